"""runs -> tables, charts and one self-contained page."""

from waffle_fl.report.page import write_report

__all__ = ["write_report"]
