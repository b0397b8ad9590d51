"""Run a peer, in the peers' environment: python -m benchmarks.peers flower FOLDER

The peer's module is imported by its name, so that the processes it starts can import it too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    _, peer, folder = sys.argv
    import_module(f"benchmarks.peers.{peer}").run(Path(folder))
