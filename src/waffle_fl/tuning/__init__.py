"""Search for a method's hyperparameters on validation data.

space      what is searched, method by method       study   Optuna: what to try next, and what to give up
search     the loop: ask, train together, tell      report  the record, best.toml and the chart
"""
