"""Write finished runs as tables, charts and one self-contained HTML page."""

from waffle_fl.report.page import write_report

__all__ = ["write_report"]
