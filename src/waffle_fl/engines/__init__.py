"""Engines run the rounds of an algorithm: `simulate` on one machine, `flower` on many; both call the same functions."""
