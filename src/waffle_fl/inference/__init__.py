"""Use the result: a finished run's model for new data, for other programs, and as a scikit-learn estimator."""
