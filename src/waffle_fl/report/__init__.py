"""runs -> tables, charts and one self-contained page."""

from waffle_fl.report.page import write_report
from waffle_fl.report.runs import PROTOCOLS, Finished, Protocol, condense, read_runs, scores

__all__ = ["PROTOCOLS", "Finished", "Protocol", "condense", "read_runs", "scores", "write_report"]
