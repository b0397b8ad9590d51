"""Inference with trained models: prediction on new data, export, and scikit-learn estimators."""
