"""Benchmarks: each is one command that writes a record in results/."""
