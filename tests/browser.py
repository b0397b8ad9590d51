"""Headless Chromium for tests of pages. In CI (`WAFFLE_BROWSER=required`) a missing browser is a failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it if a browser is required."""
    if os.environ.get("WAFFLE_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def launched() -> Iterator[Any]:
    """Start a browser."""
    try:
        from playwright import sync_api
    except ImportError:
        skip_or_fail("playwright is not installed: `make setup` installs it")
    with sync_api.sync_playwright() as playwright:
        found = CHROMIUM or playwright.chromium.executable_path
        if not Path(found).exists():
            skip_or_fail(
                "no Chromium on this machine: install Debian's `chromium`, or run `playwright install chromium`"
            )
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            skip_or_fail(f"{found} does not start here: {error.message.splitlines()[0]}")
        yield browser
        browser.close()
