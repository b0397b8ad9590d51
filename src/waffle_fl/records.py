"""A run folder: config, provenance, one JSON line a round, atomic checkpoints, the final model. Nothing is unpickled.

    config.json        what was asked           rounds.jsonl               one line a round
    provenance.json    what it ran on           checkpoint-*.safetensors   the newest two states
    result.json        how it ended             model.safetensors          Alice's model
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
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from waffle_fl import __version__
from waffle_fl.config import SCHEMA, RunConfig
from waffle_fl.errors import WaffleError

MAX_HEADER = 1 << 20
KEPT = 2
DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "BOOL": torch.bool}
WIDTHS = {"F64": 8, "F32": 4, "I64": 8, "BOOL": 1}


class Run:
    """A locked run folder. Open it with `Run.opened`, which also finds out where to go on from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        with _locked(folder):
            with _readable_errors(folder):
                run._settle(config.to_json(), dict(provenance), force)
                run._log = (folder / "rounds.jsonl").open("ab")
            try:
                yield run
            finally:
                run._log.close()

    def _settle(self, config: dict[str, Any], provenance: dict[str, Any], force: bool) -> None:
        known = read_json(self.folder / "config.json")
        if known is None:
            write_json(self.folder / "provenance.json", provenance)
            write_json(self.folder / "config.json", config)
            return
        before = {**known, "provenance": _binding(read_json(self.folder / "provenance.json") or {})}
        after = {**json.loads(json.dumps(config)), "provenance": _binding(provenance)}
        changes = list(_differences(before, after))
        if changes and not force:
            raise WaffleError(
                f"{self.folder} holds another run: {'; '.join(changes)}; choose another --out, or --force to go on anyway"
            )
        if changes:
            history = read_json(self.folder / "provenance.json") or {}
            forced = [*history.get("forced", []), changes]
            write_json(self.folder / "provenance.json", {**provenance, "forced": forced})
            write_json(self.folder / "config.json", config)

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
                r, tensors = read_tensors(path, template)
            except WaffleError as error:
                warnings.append(f"{error}; going back to the checkpoint before it")
                continue
            self._cut_log(r)
            return r, tensors, warnings
        if candidates:
            raise WaffleError(f"no sound checkpoint is left in {self.folder} ({warnings[0]}): delete the folder to start anew")
        self._cut_log(0)
        return 0, None, warnings

    def _cut_log(self, last: int) -> None:
        path = self.folder / "rounds.jsonl"
        lines = read_rounds(path)
        keep = [line for line in lines if line["round"] <= last]
        if len(keep) < last:
            raise WaffleError(f"{path} lacks rounds before {last}: delete the folder to start anew")
        if path.exists():
            self._log.close()
            _write_atomically(path, b"".join(_json_line(line) for line in keep))
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
            write_tensors(self.folder / f"checkpoint-{r:08d}.safetensors", r, tensors)
            for old in sorted(self.folder.glob("checkpoint-*.safetensors"))[:-KEPT]:
                old.unlink()

    def close(self, result: Mapping[str, Any], model: Mapping[str, Tensor] | None) -> None:
        """Write the final model and how the run ended; a finished run needs its checkpoints no more."""
        with _readable_errors(self.folder):
            if model is not None:
                write_tensors(self.folder / "model.safetensors", int(result["rounds"]), model)
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
    here = Path(__file__).parent
    names = ("algorithms", "models", "engines", "federation.py", "partition.py", "randomness.py", "guard.py")
    files = sorted(f for name in names for f in ([here / name] if name.endswith(".py") else (here / name).rglob("*.py")))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def summary(rounds: list[dict[str, Any]], status: str, message: str = "") -> dict[str, Any]:
    """Best round (the paper's protocol), last round, and the one that validation selects."""
    scored = [line for line in rounds if line.get("loss") is not None]
    result: dict[str, Any] = {"schema": SCHEMA, "status": status, "rounds": len(rounds)}
    if message:
        result["message"] = message
    if scored:
        best = max(scored, key=lambda line: line["accuracy"])
        result["best"] = {"round": best["round"], "accuracy": best["accuracy"]}
        result["last"] = {"round": scored[-1]["round"], "accuracy": scored[-1]["accuracy"]}
        judged = [line for line in scored if line.get("validation_loss") is not None]
        if judged:
            chosen = max(judged, key=lambda line: (line["validation_accuracy"], -line["validation_loss"]))
            result["selected"] = {"round": chosen["round"], "accuracy": chosen["accuracy"]}
    return result


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, in order; a half line at its end, left by a crash, is passed over."""
    rounds: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                content = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
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
    _write_atomically(path, (json.dumps(content, indent=2, sort_keys=False) + "\n").encode())


def write_tensors(path: Path, r: int, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file that carries its round and a digest of its content, written whole or not at all."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    _write_atomically(path, save(held, {"schema": str(SCHEMA), "round": str(r), "digest": _digest(held)}))


def read_tensors(path: Path, template: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    """Round and tensors of a file that must match the template exactly; checked before anything is allocated."""
    header = read_header(path)
    metadata = header.pop("__metadata__", {})
    found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    wanted = {name: (_dtype_name(t), tuple(t.shape)) for name, t in template.items()}
    if found != wanted:
        odd = sorted(set(found.items()) ^ set(wanted.items()))[0][0]
        raise WaffleError(f"{path} does not fit this run: {odd} is {found.get(odd, 'missing')}, not {wanted.get(odd, 'known')}")
    try:
        tensors = load(path.read_bytes())
    except (SafetensorError, OSError, ValueError) as error:
        raise WaffleError(f"{path} is damaged ({error})") from None
    if metadata.get("digest") != _digest(tensors):
        raise WaffleError(f"{path} is damaged (its content has another digest)")
    return int(metadata["round"]), tensors


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, with every size checked against the file's own."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise WaffleError(f"{path} is not a safetensors file of ours: its header would be {length} bytes")
            header = json.loads(stream.read(length))
        ends = [0]
        for name, entry in header.items():
            if name == "__metadata__":
                if not all(isinstance(v, str) for v in entry.values()) or not entry["round"].isdigit():
                    raise ValueError("metadata")
                continue
            begin, end = entry["data_offsets"]
            count = 1
            for dimension in entry["shape"]:
                if type(dimension) is not int or dimension < 0:
                    raise ValueError("shape")
                count *= dimension
            if end - begin != count * WIDTHS[entry["dtype"]] or end > size - 8 - length or begin < 0:
                raise ValueError("offsets")
            ends.append(end)
        if max(ends) != size - 8 - length:
            raise ValueError("length")
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WaffleError(f"{path} is not a safetensors file of ours: its header is damaged") from None
    return header  # type: ignore[no-any-return]


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + memoryview(tensors[name].contiguous().numpy()).tobytes())
    return digest.hexdigest()


def _dtype_name(tensor: Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _json_line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _binding(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict(content.get("binding", {}))


def _differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
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
def _locked(folder: Path) -> Iterator[None]:
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
