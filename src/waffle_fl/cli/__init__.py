"""The `waffle` command. A user error prints one line on stderr and exits with 2; a bug keeps its traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point."""
    try:
        code = _run(sys.argv[1:])
    except KeyboardInterrupt:
        print("waffle: stopped; run the same command again to continue from the last checkpoint", file=sys.stderr)
        code = 130
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run the command. Imports take seconds and happen here, so that `main` also catches Ctrl-C during them."""
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
        print("waffle: stopped; every run is saved: run the same command again to continue", file=sys.stderr)
        return 128 + stop.signal
    except BrokenPipeError:
        sys.stderr.close()
        return 1
