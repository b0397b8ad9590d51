"""The `waffle` command. A user's mistake is one line on stderr and exit code 2; a bug keeps its traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point."""
    try:
        code = _run(sys.argv[1:])
    except KeyboardInterrupt:
        print("waffle: stopped at once; the same command goes on from the last checkpoint", file=sys.stderr)
        code = 130
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Imports take a while, and Ctrl-C may come even then: so nothing is imported before."""
    from waffle_fl import __version__
    from waffle_fl.cli import menu
    from waffle_fl.errors import Interrupted, WaffleError

    if arguments == ["--version"]:
        print(f"waffle-fl {__version__}")
        return 0
    try:
        return menu.main(arguments)
    except WaffleError as error:
        print(f"waffle: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print("waffle: stopped; every run is saved, and the same command goes on from here", file=sys.stderr)
        return 128 + stop.signal
    except BrokenPipeError:
        sys.stderr.close()
        return 1
