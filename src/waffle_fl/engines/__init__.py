"""Engines run algorithms: `simulate` in one process; each calls the same pure functions."""
