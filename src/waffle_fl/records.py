"""A run folder: config, provenance, one JSON line a round, atomic checkpoints, the final model. Nothing is unpickled.

config.json          what was asked                  rounds.jsonl               one line a round
provenance.json      what it ran on                  checkpoint-*.safetensors   the newest two states
preprocessing.json   how Alice's tables are read     model.safetensors          Alice's model
result.json          how it ended                    manifest.json              digests of all these, signed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waffle_fl import __version__
from waffle_fl.atomic_files import check_regular, remove, write_atomically
from waffle_fl.config import SCHEMA, RunConfig, completed
from waffle_fl.errors import WaffleError, readable_errors
from waffle_fl.manifest import CHECKPOINTS, LOG, NAME, Digest, Finding, Journal, inspect, refuse, seal
from waffle_fl.manifest import summary as summary_of
from waffle_fl.round_log import RoundLog, json_line
from waffle_fl.round_log import read_rounds as read_rounds  # part of what is read back here
from waffle_fl.tensorfile import pack, read_tensors
from waffle_fl.versions import RESULTS_VERSION

KEPT = 2


class Run:
    """A locked run folder. Open it with `Run.opened`, which also finds out where to go on from."""

    def __init__(self, folder: Path, force: bool = False) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.findings: list[Finding] = []  # what the manifest told when the folder was opened
        self._force = force
        self._log: RoundLog
        self._journal = Journal(folder, {})

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, folder: Path, config: RunConfig, provenance: Mapping[str, Any], force: bool = False
    ) -> Iterator[Run]:
        """Lock the folder, create it if new, refuse it if it belongs to another config, data or results version.

        A folder whose files are not those its manifest lists is refused too, unless forced."""
        run = cls(folder, force)
        with readable_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            with readable_errors(folder):
                run._settle(config.to_json(), dict(provenance))
                run._log = RoundLog(folder / LOG)
            try:
                yield run
            finally:
                with contextlib.suppress(OSError):  # a full disk has been told of already
                    run._log.close()

    def _settle(self, config: dict[str, Any], provenance: dict[str, Any]) -> None:
        known = read_json(self.folder / "config.json")
        if known is None:
            if self.result is not None:
                raise WaffleError(f"{self.folder} has a result.json but no config.json: choose another --out")
            if (self.folder / NAME).exists():  # the run died before its config was written
                self._check(inspect(self.folder))
            self._describe(config, provenance)
            return
        asked = _changed(known, config)
        ran_on = _binding(read_json(self.folder / "provenance.json") or {})
        changes = [*asked, *differences(ran_on, _binding(provenance), "provenance")]
        if self.result is not None:
            if asked:
                raise WaffleError(f"{self.folder} holds a finished run: {'; '.join(asked)}; choose another --out")
            if changes:
                self.notes.append(f"finished runs used other software or data ({changes[0]}); delete them to run again")
        elif changes and not self._force:
            raise WaffleError(
                f"{self.folder} holds another run: {'; '.join(changes)}; choose another --out, or --force to go on"
            )
        changes += self._check(inspect(self.folder))
        if changes and self.result is None:
            history = read_json(self.folder / "provenance.json") or {}
            self._describe(config, {**provenance, "forced": [*history.get("forced", []), changes]})

    def _check(self, finding: Finding | None) -> list[str]:
        """Refuse a folder that was changed or has no manifest, unless forced; then list what it holds now.

        Return what was wrong. A finished run stays as it is, so that a change in it is told every time."""
        refuse([finding] if finding else [], self._force)
        self.findings += [finding] if finding else []
        changed = finding is not None and finding.kind == "changed"
        if finding and (finding.kind == "missing" or (changed and self.result is None)):
            seal(self.folder)
        if not (changed and self.result is not None):
            self._journal = Journal.opened(self.folder)
        return [finding.text] if finding and finding.text else []

    def _describe(self, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        self._write({"provenance.json": json_bytes(provenance), "config.json": json_bytes(config)})

    def _write(self, contents: Mapping[str, bytes], **listed: Digest) -> None:
        """Write files that the manifest lists from now on, in this order."""
        with self._journal.replacing({**listed, **{name: Digest.of(content) for name, content in contents.items()}}):
            for name, content in contents.items():
                write_atomically(self.folder / name, content)

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file that belongs to the run."""
        with readable_errors(self.folder):
            self._write({name: json_bytes(content)})

    @property
    def result(self) -> dict[str, Any] | None:
        """How the run ended, or None while it has not."""
        return read_json(self.folder / "result.json")

    def resume(self, template: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor] | None, list[str]]:
        """(the round of the newest sound checkpoint, its tensors, warnings); the log is cut back to that round."""
        warnings = summary_of(self.findings)
        candidates = sorted(self.folder.glob(CHECKPOINTS), reverse=True)
        damaged: list[str] = []
        for path in candidates:
            try:
                metadata, tensors = read_tensors(path, template)
                r = int(metadata["round"])
            except (KeyError, ValueError) as error:
                damaged.append(f"{error}; going back to the checkpoint before it")
                continue
            warnings += [*damaged, *self._admit(self._journal.difference(path))]
            warnings += self._cut_log(r)
            for bad in candidates[: candidates.index(path)]:
                with contextlib.suppress(OSError):
                    remove(bad)  # or it would keep the place of a sound one
                    self._journal.forget(bad.name)
            return r, tensors, warnings
        if candidates:
            raise WaffleError(
                f"no sound checkpoint is left in {self.folder} ({damaged[0]}): delete the folder to start anew"
            )
        self._cut_log(0)
        return 0, None, warnings

    def _admit(self, odd: str) -> list[str]:
        """A warning of what was changed, if forced; else an error."""
        found = [Finding("changed", self.folder, odd)] if odd else []
        refuse(found, self._force)
        return summary_of(found)

    def _cut_log(self, last: int) -> list[str]:
        """Drop the rounds after the last one; return a warning if those before were changed and that is forced."""
        path = self.folder / LOG
        keep = read_rounds(path)[:last]
        if len(keep) < last:
            raise WaffleError(f"{path} lacks rounds before {last}: delete the folder to start anew")
        warnings = self._admit(self._journal.difference(path) if last else "")
        content = b"".join(map(json_line, keep))
        with readable_errors(self.folder):
            self._log.close()
            if last:
                self._write({LOG: content})
            else:  # any file begins with nothing
                self._journal.forget(LOG)
                write_atomically(path, content)
            self._log = RoundLog(path)
        return warnings

    def append(self, measured: Mapping[str, Any]) -> None:
        """Add one round to the log."""
        line = json_line(measured)
        with readable_errors(self.folder):
            self._log.append(line)

    def checkpoint(self, r: int, tensors: Mapping[str, Tensor]) -> None:
        """Save the state after round r; the state before it stays until this one is safe."""
        with readable_errors(self.folder):
            self._log.sync()
            self._journal.grown(LOG, self._log.digest)
            self._write({f"checkpoint-{r:08d}.safetensors": pack(tensors, {"round": str(r)})})
            self._drop(sorted(self.folder.glob(CHECKPOINTS))[:-KEPT])

    def _drop(self, checkpoints: Sequence[Path]) -> None:
        remove(*checkpoints)
        self._journal.forget(*(path.name for path in checkpoints))

    def close(
        self,
        result: Mapping[str, Any],
        model: Mapping[str, Tensor] | None = None,
        predictions: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the final model, what it says of Alice's test data, and how the run ended; checkpoints may go then."""
        labels = {"round": str(result["rounds"])}
        found = {"model": model, "predictions": predictions}
        contents = {f"{name}.safetensors": pack(tensors, labels) for name, tensors in found.items() if tensors}
        with readable_errors(self.folder):
            self._log.sync()
            self._write({**contents, "result.json": json_bytes(result)}, **{LOG: self._log.digest})
            if result["status"] == "finished":
                self._drop(list(self.folder.glob(CHECKPOINTS)))
            self._journal.settle()


def other_settings(folder: Path, config: RunConfig) -> list[str]:
    """In what the config of the run that a folder holds differs; nothing where it holds no run, or this one."""
    known = read_json(folder / "config.json")
    return [] if known is None else _changed(known, config.to_json())


def _changed(known: Any, config: Mapping[str, Any]) -> list[str]:
    """What differs between a folder's config and the requested one."""
    before = completed(known, config["method"])
    return list(differences(*(json.loads(json.dumps(content)) for content in (before, config))))


def provenance(device: str, data_digest: str, **more: Any) -> dict[str, Any]:
    """What a run ran on. The `binding` part must not change between a run and its resumption."""
    return {
        "waffle": __version__,
        "python": platform.python_version(),
        "host": platform.machine(),
        **more,
        "binding": {
            "results_version": RESULTS_VERSION,
            "torch": torch.__version__,
            "device": device,
            "data": data_digest,
        },
    }


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


def read_json(path: Path) -> dict[str, Any] | None:
    check_regular(path)
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
    write_atomically(path, json_bytes(content))


def json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=False) + "\n").encode()


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
def locked(folder: Path) -> Iterator[None]:
    """One process a folder; the kernel frees the lock when its holder dies."""
    with readable_errors(folder):
        stream = check_regular(folder / ".lock").open("a+")
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
