"""A run folder: config, provenance, one JSON line a round, atomic checkpoints, the final model. Nothing is unpickled.

config.json          what was asked                  rounds.jsonl               one line a round
provenance.json      what it ran on                  checkpoint-*.safetensors   the newest two states
preprocessing.json   how Alice's tables are read     model.safetensors          Alice's model
result.json          how it ended
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waffle_fl import __version__
from waffle_fl.config import SCHEMA, RunConfig, completed
from waffle_fl.errors import WaffleError
from waffle_fl.tensorfile import read_tensors, write_atomically, write_tensors

KEPT = 2
DECIDING = (
    *("algorithms", "models", "engines", "batches.py", "federation.py", "partition.py"),
    *("shifts", "randomness.py", "guard.py", "attacks"),
)


class Run:
    """A locked run folder. Open it with `Run.opened`, which also finds out where to go on from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._log: Any = None

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, folder: Path, config: RunConfig, provenance: Mapping[str, Any], force: bool = False
    ) -> Iterator[Run]:
        """Lock the folder, create it if new, refuse it if it belongs to another config, data set or code."""
        run = cls(folder)
        with _readable_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            with _readable_errors(folder):
                run._settle(config.to_json(), dict(provenance), force)
                run._log = (folder / "rounds.jsonl").open("ab")
            try:
                yield run
            finally:
                with contextlib.suppress(OSError):  # a full disk has been told of already
                    run._log.close()

    def _settle(self, config: dict[str, Any], provenance: dict[str, Any], force: bool) -> None:
        known = read_json(self.folder / "config.json")
        if known is None:
            write_json(self.folder / "provenance.json", provenance)
            write_json(self.folder / "config.json", config)
            return
        asked = list(differences(*(json.loads(json.dumps(content)) for content in (completed(known), config))))
        ran_on = _binding(read_json(self.folder / "provenance.json") or {})
        changes = [*asked, *differences(ran_on, _binding(provenance), "provenance")]
        if self.result is not None:
            if asked:
                raise WaffleError(f"{self.folder} holds a finished run: {'; '.join(asked)}; choose another --out")
            if changes:
                self.notes.append(f"finished runs were made otherwise ({changes[0]}): delete them to run them anew")
            return
        if changes and not force:
            raise WaffleError(
                f"{self.folder} holds another run: {'; '.join(changes)}; choose another --out, or --force to go on"
            )
        if changes:
            history = read_json(self.folder / "provenance.json") or {}
            forced = [*history.get("forced", []), changes]
            write_json(self.folder / "provenance.json", {**provenance, "forced": forced})
            write_json(self.folder / "config.json", config)

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file that belongs to the run."""
        with _readable_errors(self.folder):
            write_json(self.folder / name, content)

    @property
    def result(self) -> dict[str, Any] | None:
        """How the run ended, or None while it has not."""
        return read_json(self.folder / "result.json")

    def resume(self, template: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor] | None, list[str]]:
        """(the round of the newest sound checkpoint, its tensors, warnings); the log is cut back to that round."""
        warnings = []
        candidates = sorted(self.folder.glob("checkpoint-*.safetensors"), reverse=True)
        for path in candidates:
            try:
                metadata, tensors = read_tensors(path, template)
                r = int(metadata["round"])
            except (WaffleError, KeyError, ValueError) as error:
                warnings.append(f"{error}; going back to the checkpoint before it")
                continue
            self._cut_log(r)
            for damaged in candidates[: candidates.index(path)]:
                with contextlib.suppress(OSError):
                    damaged.unlink()  # or it would keep the place of a sound one
            return r, tensors, warnings
        if candidates:
            raise WaffleError(
                f"no sound checkpoint is left in {self.folder} ({warnings[0]}): delete the folder to start anew"
            )
        self._cut_log(0)
        return 0, None, warnings

    def _cut_log(self, last: int) -> None:
        path = self.folder / "rounds.jsonl"
        lines = read_rounds(path)
        keep = [line for line in lines if line["round"] <= last]
        if len(keep) < last:
            raise WaffleError(f"{path} lacks rounds before {last}: delete the folder to start anew")
        with _readable_errors(self.folder):
            self._log.close()
            write_atomically(path, b"".join(_json_line(line) for line in keep))
            self._log = path.open("ab")

    def append(self, measured: Mapping[str, Any]) -> None:
        """Add one round to the log."""
        with _readable_errors(self.folder):
            self._log.write(_json_line(measured))
            self._log.flush()

    def checkpoint(self, r: int, tensors: Mapping[str, Tensor]) -> None:
        """Save the state after round r; the state before it stays until this one is safe."""
        with _readable_errors(self.folder):
            os.fsync(self._log.fileno())
            write_tensors(self.folder / f"checkpoint-{r:08d}.safetensors", {"round": str(r)}, tensors)
            for old in sorted(self.folder.glob("checkpoint-*.safetensors"))[:-KEPT]:
                old.unlink()

    def close(
        self,
        result: Mapping[str, Any],
        model: Mapping[str, Tensor] | None = None,
        predictions: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the final model, what it says of Alice's test data, and how the run ended; checkpoints may go then."""
        with _readable_errors(self.folder):
            for name, tensors in (("model", model), ("predictions", predictions)):
                if tensors is not None:
                    write_tensors(self.folder / f"{name}.safetensors", {"round": str(result["rounds"])}, tensors)
            write_json(self.folder / "result.json", result)
            if result["status"] == "finished":
                for old in self.folder.glob("checkpoint-*.safetensors"):
                    old.unlink()


def provenance(device: str, data_digest: str, **more: Any) -> dict[str, Any]:
    """What a run ran on. The `binding` part must not change between a run and its resumption."""
    return {
        "waffle": __version__,
        "python": platform.python_version(),
        "host": platform.machine(),
        **more,
        "binding": {"code": code_digest(), "torch": torch.__version__, "device": device, "data": data_digest},
    }


def code_digest() -> str:
    """A hash of the modules that decide results."""
    return digest_of(*DECIDING)


def digest_of(*names: str) -> str:
    """A hash of these modules and packages of ours."""
    here = Path(__file__).parent
    files = sorted(
        f for name in names for f in ([here / name] if name.endswith(".py") else (here / name).rglob("*.py"))
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def summary(rounds: list[dict[str, Any]], status: str, message: str = "") -> dict[str, Any]:
    """Best round (the paper's protocol), last round, and the one that validation selects."""
    scored = [line for line in rounds if None not in (line.get("loss"), line.get("accuracy", line.get("rmse")))]
    result: dict[str, Any] = {"schema": SCHEMA, "status": status, "rounds": len(rounds)}
    if message:
        result["message"] = message
    if scored:
        best = max(scored, key=lambda line: _merit(line, ""))
        result["best"] = _told(best)
        result["last"] = _told(scored[-1])
        judged = [line for line in scored if line.get("validation_loss") is not None]
        if judged:
            result["selected"] = _told(max(judged, key=lambda line: _merit(line, "validation_")))
    return result


def _merit(line: Mapping[str, Any], prefix: str) -> tuple[float, float]:
    """The larger the better; a tie in accuracy on validation data goes to the smaller loss."""
    accuracy = line.get(f"{prefix}accuracy") or 0.0
    return accuracy, -line[f"{prefix}loss"] if prefix or "rmse" in line else 0.0


def _told(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("round", "accuracy", "rmse") if key in line}


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, in order; a half line at its end, left by a crash, is passed over."""
    rounds: list[dict[str, Any]] = []
    with _readable_errors(path.parent), contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                content = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                content = None
            if not isinstance(content, dict) or content.get("round") != len(rounds) + 1:
                break
            rounds.append(content)
    return rounds


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WaffleError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise WaffleError(f"{path}: expected a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=False) + "\n").encode())


def _json_line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _binding(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict(content.get("binding", {}))


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """What has changed between two contents, one line a value."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield f"{path} was {before!r}, now {after!r}"


@contextlib.contextmanager
def _readable_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WaffleError(
            f"cannot write to {folder}: {error.strerror}; what was saved before is intact, and the same command goes on"
        ) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process a folder; the kernel frees the lock when its holder dies."""
    with _readable_errors(folder):
        stream = (folder / ".lock").open("a+")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise WaffleError(f"{folder} is in use by {holder}: wait for it, or choose another --out") from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        yield
