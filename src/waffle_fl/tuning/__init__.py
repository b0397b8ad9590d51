"""Search for a method's hyperparameters on validation data, by `waffle tune` or, on the user's own data, by default.

space          the search space of each method
optuna_study   Optuna: sampling and pruning of trials
search         the loop over batches of trials
report         the record, best.toml and the chart

default_training, trials, trial_scores   the training of `run` and `decide` on the user's own data
"""
