"""Search for a method's hyperparameters on validation data.

space          the search space of each method
optuna_study   Optuna: sampling and pruning of trials
search         the loop over batches of trials
report         the record, best.toml and the chart
"""
