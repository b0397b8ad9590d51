"""Run folders: config, provenance, one JSON line per round, atomic checkpoints, the final model. No pickle is used.

config.json          method, settings, options       rounds.jsonl               one line per round
provenance.json      software, device, data          checkpoint-*.safetensors   the newest two states
preprocessing.json   how Alice's tables are read     model.safetensors          Alice's model
scaling.json         how her arrays are scaled       predictions.safetensors    its outputs for her test data
result.json          status and scores               manifest.json              signed digests of all these files
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from waffle_fl import __version__
from waffle_fl.atomic_files import check_regular, remove, write_atomically
from waffle_fl.config import SCHEMA, RunConfig, completed
from waffle_fl.errors import WaffleError, readable_errors
from waffle_fl.manifest import CHECKPOINTS, LOG, NAME, Digest, Finding, Journal, inspect, refuse, seal
from waffle_fl.manifest import summary as summary_of
from waffle_fl.round_log import RoundLog, json_line
from waffle_fl.round_log import read_rounds as read_rounds  # re-exported
from waffle_fl.tensorfile import pack, read_tensors
from waffle_fl.versions import RESULTS_VERSION

CHECKPOINTS_KEPT = 2


class Run:
    """A locked run folder. Open it with `Run.opened`."""

    def __init__(self, folder: Path, force: bool = False) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.findings: list[Finding] = []  # of the manifest check when the folder was opened
        self._force = force
        self._log: RoundLog
        self._journal = Journal(folder, {})

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, folder: Path, config: RunConfig, provenance: Mapping[str, Any], force: bool = False
    ) -> Iterator[Run]:
        """Lock the folder and create it if new. Reject a folder with another config, data or results version.

        A folder whose files do not match its manifest is also rejected, unless forced."""
        run = cls(folder, force)
        with readable_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            with readable_errors(folder):
                run._check_or_create(config.to_json(), dict(provenance))
                run._log = RoundLog(folder / LOG)
            try:
                yield run
            finally:
                with contextlib.suppress(OSError):  # a full disk has already been reported
                    run._log.close()

    def _check_or_create(self, config: dict[str, Any], provenance: dict[str, Any]) -> None:
        known = read_json(self.folder / "config.json")
        if known is None:
            if self.result is not None:
                raise WaffleError(f"{self.folder} has a result.json but no config.json: choose another --out")
            if (self.folder / NAME).exists():  # the run was killed before its config was written
                self._check(inspect(self.folder))
            self._describe(config, provenance)
            return
        config_changes = _changed(known, config)
        ran_on = _binding(read_json(self.folder / "provenance.json") or {})
        changes = [*config_changes, *differences(ran_on, _binding(provenance), "provenance")]
        if self.result is not None:
            if config_changes:
                raise WaffleError(
                    f"{self.folder} holds a finished run: {'; '.join(config_changes)}; choose another --out"
                )
            if changes:
                self.notes.append(f"finished runs used other software or data ({changes[0]}); delete them to run again")
        elif changes and not self._force:
            raise WaffleError(
                f"{self.folder} holds another run: {'; '.join(changes)}; choose another --out, or continue with --force"
            )
        changes += self._check(inspect(self.folder))
        if changes and self.result is None:
            history = read_json(self.folder / "provenance.json") or {}
            self._describe(config, {**provenance, "forced": [*history.get("forced", []), changes]})

    def _check(self, finding: Finding | None) -> list[str]:
        """Reject a folder that was changed or has no manifest, unless forced; then write a manifest of its files.

        Return the problems. The manifest of a finished run is not rewritten: a change is reported every time."""
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
        """Write files in this order and list them in the manifest."""
        with self._journal.replacing({**listed, **{name: Digest.of(content) for name, content in contents.items()}}):
            for name, content in contents.items():
                write_atomically(self.folder / name, content)

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file that belongs to the run."""
        with readable_errors(self.folder):
            self._write({name: json_bytes(content)})

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of the run, or None if it has not ended."""
        return read_json(self.folder / "result.json")

    def resume(self, template: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor] | None, list[str]]:
        """Return (round, tensors, warnings) of the newest valid checkpoint, and truncate the log to that round."""
        warnings = summary_of(self.findings)
        candidates = sorted(self.folder.glob(CHECKPOINTS), reverse=True)
        damaged: list[str] = []
        for path in candidates:
            try:
                metadata, tensors = read_tensors(path, template)
                r = int(metadata["round"])
            except (KeyError, ValueError) as error:
                damaged.append(f"{error}; using the checkpoint before it")
                continue
            warnings += [*damaged, *self._check_unchanged(self._journal.difference(path))]
            warnings += self._cut_log(r)
            for bad in candidates[: candidates.index(path)]:
                with contextlib.suppress(OSError):
                    remove(bad)  # otherwise it would count as one of the newest two
                    self._journal.forget(bad.name)
            return r, tensors, warnings
        if candidates:
            raise WaffleError(
                f"no valid checkpoint is left in {self.folder} ({damaged[0]}): delete the folder to start again"
            )
        self._cut_log(0)
        return 0, None, warnings

    def _check_unchanged(self, change: str) -> list[str]:
        """Raise an error if there is a change; if forced, return it as a warning."""
        found = [Finding("changed", self.folder, change)] if change else []
        refuse(found, self._force)
        return summary_of(found)

    def _cut_log(self, last: int) -> list[str]:
        """Drop the rounds after `last`. If forced, return a warning if the rounds before it were changed."""
        path = self.folder / LOG
        keep = read_rounds(path)[:last]
        if len(keep) < last:
            raise WaffleError(f"{path} lacks rounds before {last}: delete the folder to start again")
        warnings = self._check_unchanged(self._journal.difference(path) if last else "")
        content = b"".join(map(json_line, keep))
        with readable_errors(self.folder):
            self._log.close()
            if last:
                self._write({LOG: content})
            else:  # an empty log needs no digest
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
        """Save the state after round r. The previous checkpoint is kept until this one is on disk."""
        with readable_errors(self.folder):
            self._log.sync()
            self._journal.grown(LOG, self._log.digest)
            self._write({f"checkpoint-{r:08d}.safetensors": pack(tensors, {"round": str(r)})})
            self._drop(sorted(self.folder.glob(CHECKPOINTS))[:-CHECKPOINTS_KEPT])

    def _drop(self, checkpoints: Sequence[Path]) -> None:
        remove(*checkpoints)
        self._journal.forget(*(path.name for path in checkpoints))

    def close(
        self,
        result: Mapping[str, Any],
        model: Mapping[str, Tensor] | None = None,
        predictions: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the final model, its predictions on Alice's test data, and the result; then delete the checkpoints."""
        labels = {"round": str(result["rounds"])}
        found = {"model": model, "predictions": predictions}
        contents = {f"{name}.safetensors": pack(tensors, labels) for name, tensors in found.items() if tensors}
        with readable_errors(self.folder):
            self._log.sync()
            self._write({**contents, "result.json": json_bytes(result)}, **{LOG: self._log.digest})
            if result["status"] == "finished":
                self._drop(list(self.folder.glob(CHECKPOINTS)))
            self._journal.compact()


def other_settings(folder: Path, config: RunConfig) -> list[str]:
    """Return the differences between this config and that of the run in a folder; empty if there is none."""
    known = read_json(folder / "config.json")
    return [] if known is None else _changed(known, config.to_json())


def _changed(known: Any, config: Mapping[str, Any]) -> list[str]:
    """Return the differences between a folder's config and the requested one."""
    before = completed(known, config["method"])
    return list(differences(*(json.loads(json.dumps(content)) for content in (before, config))))


def provenance(device: str, data_digest: str, **more: Any) -> dict[str, Any]:
    """Return the software, device and data of a run. The `binding` part must be the same when a run is resumed."""
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


class Selection(NamedTuple):
    """How a round is selected: by a validation score, or given by its number."""

    by: Literal["accuracy", "loss"] = "accuracy"
    round: int = 0

    def rank(self, line: Mapping[str, Any]) -> tuple[float, float]:
        """Return a sort key, larger is better; a round that cannot be selected is the worst."""
        if self.round:
            return (0.0 if line["round"] == self.round else -math.inf), 0.0
        if line.get("validation_loss") is None:
            return -math.inf, -math.inf
        return _rank(line, "validation_") if self.by == "accuracy" else (0.0, -line["validation_loss"])


BY_ACCURACY = Selection()


def summary(
    rounds: list[dict[str, Any]], status: str, message: str = "", selection: Selection = BY_ACCURACY
) -> dict[str, Any]:
    """Return the result of a run: best round (the paper's protocol), last round, round selected on validation data."""
    scored = [line for line in rounds if None not in (line.get("loss"), line.get("accuracy", line.get("rmse")))]
    result: dict[str, Any] = {"schema": SCHEMA, "status": status, "rounds": len(rounds)}
    if message:
        result["message"] = message
    if scored:
        best = max(scored, key=lambda line: _rank(line, ""))
        result["best"] = _entry(best)
        result["last"] = _entry(scored[-1])
        selected = max(scored, key=selection.rank)
        if selection.rank(selected)[0] > -math.inf:
            result["selected"] = _entry(selected)
    return result


def _rank(line: Mapping[str, Any], prefix: str) -> tuple[float, float]:
    """Return a sort key, larger is better. Ties in validation accuracy are broken by the smaller loss."""
    accuracy = line.get(f"{prefix}accuracy") or 0.0
    return accuracy, -line[f"{prefix}loss"] if prefix or "rmse" in line else 0.0


def _entry(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("round", "accuracy", "rmse", "by_agent") if key in line}


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
    """Yield one line per value that differs between two contents."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield f"{path} was {before!r}, now {after!r}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The kernel releases the lock when the process ends."""
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
