"""The `waffle` command. A user's mistake is one line on stderr and exit code 2; a bug keeps its traceback."""

from __future__ import annotations

import sys

from waffle_fl import __version__
from waffle_fl.errors import WaffleError


def main() -> None:
    """Entry point."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"waffle-fl {__version__}")
        return
    from waffle_fl.cli import commands
    from waffle_fl.experiment import Interrupted

    try:
        code = commands.main(arguments)
    except WaffleError as error:
        print(f"waffle: {error}", file=sys.stderr)
        code = 2
    except Interrupted as stop:
        print("waffle: stopped; every run is saved, and the same command goes on from here", file=sys.stderr)
        code = 128 + stop.signal
    except KeyboardInterrupt:
        print("waffle: stopped at once; the same command goes on from the last checkpoint", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    sys.exit(code)
