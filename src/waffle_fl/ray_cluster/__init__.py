"""Runs as tasks of a Ray cluster. The only package that uses Ray, which is the optional extra `ray`.

driver          `execute` on a cluster: stacks of runs as tasks, events, results, lost workers
connection      the cluster: start or join it, its cores and GPUs
worker          the body of a task: train a stack of runs, report events
event_queue     the actor through which tasks report and are asked to stop
folder_copies   run folders without a shared disk: what changed, and writing it at the driver
"""
