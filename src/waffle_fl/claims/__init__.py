"""Claims about experiments, checked against their records.

verdict        a claim, whether it holds, and the numbers that decide it
record_files   which runs an experiment file plans, and whether its record holds them
file_claims    the claims written in an experiment file
"""
