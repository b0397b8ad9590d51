"""Install the wheel in dist/ into a clean environment per Python and run the demo there, outside of the clone.

    python tools/check_release.py [PYTHON ...]

Without arguments: python3.11, python3.12 and python3.13 where they are installed. A Python for which torch cannot be
installed is reported as skipped; any other failure makes the exit code 1.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")


def check(python: str, wheel: Path) -> str:
    """Return 'ok' or 'skipped: ...' for one Python; raise CalledProcessError if the installed package does not work."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment, elsewhere = place / "env", place / "elsewhere"
        elsewhere.mkdir()
        _run([python, "-m", "venv", str(environment)], elsewhere)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        try:
            _run([*pip, "--requirement", str(ROOT / "requirements" / "torch.txt")], elsewhere)
        except subprocess.CalledProcessError as error:
            return f"skipped: torch cannot be installed ({error.stderr.strip().splitlines()[-1]})"
        _run([*pip, str(wheel)], elsewhere)
        waffle = str(environment / "bin" / "waffle-paper")
        _run([waffle, "demo", "--quiet", "--out", "demo"], elsewhere)
        if not (elsewhere / "demo" / "report" / "index.html").is_file():
            raise subprocess.CalledProcessError(1, "waffle demo", stderr="waffle demo wrote no demo/report/index.html")
    return "ok"


def _run(command: Sequence[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def main(pythons: Sequence[str]) -> int:
    """Check every Python and print one line for each."""
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        print(f"expected one wheel in dist/, found {len(wheels)}: run make release")
        return 2
    failed = False
    for python in pythons or [name for name in PYTHONS if _works(name)]:
        try:
            print(f"{python}: {check(python, wheels[0])}", flush=True)
        except subprocess.CalledProcessError as error:
            failed = True
            print(f"{python}: FAILED: {error.cmd}\n{error.stderr}", flush=True)
    return int(failed)


def _works(python: str) -> bool:
    return (
        bool(shutil.which(python)) and subprocess.run([python, "-V"], capture_output=True, check=False).returncode == 0
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
