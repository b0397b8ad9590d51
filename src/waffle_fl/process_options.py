"""Options of the running process that Linux offers: end with the parent, a name in process listings."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent dies; other systems do not support this."""
    _process_option(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_name(name: str) -> None:
    """On Linux, set the name of this process in process listings; at most 15 characters."""
    _process_option(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _process_option(option: int, value: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
