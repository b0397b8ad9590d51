"""A tournament: every method tuned with one budget, then compared on many tasks with every agent as Alice.

plan.py      the file: data sets, columns, partitions, seeds, grids
tasks.py     one method's runs on some columns, trained in memory, scored per Alice
cost.py      what a method sends and computes per round
record.py    one JSON line per tuning trial, and per method, column and partition
running.py   what is missing in the records, trained in pieces that resume
standings.py the comparison: gaps, shares, ranks
"""
