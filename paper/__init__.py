"""The paper, reproduced: experiment files -> committed records -> tables, figures and claims beside its own numbers.

paper.py      what the paper printed            claims.py   what must hold, and whether it does
studies.py    which records belong together     figures.py  its figures, from records
running.py    makes the records                 page.py     docs/results.md, of the parts in sections.py
stated.py     claims that files state           robustness.py  the tables of docs/robustness.md
"""
