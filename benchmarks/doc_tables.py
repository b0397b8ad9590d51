"""Tables in pages of docs/, between two comments, that a command writes from a record."""

from __future__ import annotations

import re
from pathlib import Path


def write_between(page: Path, name: str, content: str) -> None:
    """Replace what is between `<!-- name -->` and `<!-- end of name -->` in a page."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
    text, count = pattern.subn(lambda _: f"{start}\n{content}\n{end}", page.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"expected {start} once in {page}, got it {count} times")
    page.write_text(text, encoding="utf-8")
