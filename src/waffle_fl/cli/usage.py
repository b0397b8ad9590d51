"""The text of `waffle --help`. It is here, and not with the commands, so that printing it does not import torch."""

from __future__ import annotations

from waffle_fl.storage import data_dir

SUMMARIES = {
    "run": "Train one method: waffle run METHOD [flags].",
    "decide": "Should an agent join? Train alone and together, compare, write the page: waffle decide DATA.",
    "bench": "Run a grid: waffle bench FILE.toml.",
    "tune": "Search for hyperparameters on validation data: waffle tune METHOD [flags].",
    "predict": "What a run's model says of new data: waffle predict RUN data.csv.",
    "export": "A run's model for other programs, with a card: waffle export RUN.",
    "report": "Tables and page from finished runs or committed records: waffle report RUNS.",
    "reproduce": "The paper's tables and figures beside its own numbers: waffle reproduce mnist.",
    "data": "Find, verify, fetch and describe a data set: waffle data NAME.",
    "demo": "Seven methods on five splits of the embedded digits: waffle demo.",
    "resume": "Go on with an interrupted run: waffle resume RUN.",
    "deploy": "The same methods on real machines, through Flower: waffle deploy init.",
}


def usage() -> str:
    """One line per command."""
    lines = "\n".join(f"  {name:<9} {summary}" for name, summary in SUMMARIES.items())
    return f"usage: waffle COMMAND ...\n\n{lines}\n\nwaffle COMMAND --help explains one; data sets lie in {data_dir()}"
