"""The paper's studies: experiment files, committed records, and the tables, figures and claims made from them.

printed_table.py   the numbers that the paper printed      claims.py   the claims, and whether they hold
studies.py         the records of each study               run_missing.py   runs the missing runs
page.py            writes the pages in docs/               sections.py, page_text.py   parts and texts of results*.md
tournament_page.py   docs/beyond*.md, kin-ablation.md   robustness_tables.py   tables of docs/robustness*.md
published_tables.py   tables of docs/published.md          published_numbers.py   the numbers that others published
flamby.py, pfllib.py, office.py   prepare published data   networks.py   their networks
figures.py         the figures                             convergence.py   rounds needed, with a paired test
drift.py, momentum.py, quadratics.py   computed records    command.py   `waffle reproduce`
"""
