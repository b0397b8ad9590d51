"""Integrity of run folders: manifest.json holds the SHA-256 digests of the files and is signed with the user's key.

A file is listed before it is written, together with the digest of the content it replaces (`Journal.replacing`). So a
process may be killed between any two writes: every file in the folder is always listed, and a listed file that does not
exist yet is not an error. `user_key.py` has the key. Of another user's manifest only the digests can be checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from waffle_fl.atomic_files import check_regular, write_atomically
from waffle_fl.errors import WaffleError
from waffle_fl.user_key import key_id, user_key

NAME, SCHEMA = "manifest.json", 1
LOG, RESULT = "rounds.jsonl", "result.json"
SMALL = ("config.json", "provenance.json", "preprocessing.json", "scaling.json", RESULT)  # always checked
LARGE = ("model.safetensors", "predictions.safetensors")  # checked only when they are read
CHECKPOINTS = "checkpoint-*.safetensors"
BLOCK = 1 << 20

Kind: TypeAlias = Literal["changed", "foreign", "unsigned", "missing"]
Warn: TypeAlias = Callable[[str], None]
FORCE = "or continue with --force (in Python force=True)"
ONCE = "; a run of an older version has none: run `waffle resume RUN --force` once to write it"


class Digest(NamedTuple):
    """Size and hash of a file, or of the beginning of a log that is still being written."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Digest:
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def at(cls, path: Path, size: int | None = None) -> Digest:
        """Return the digest of a file, or of its first `size` bytes."""
        found, left = hashlib.sha256(), sys.maxsize if size is None else size
        try:
            with check_regular(path).open("rb") as stream:
                while block := stream.read(min(left, BLOCK)):
                    found.update(block)
                    left -= len(block)
                return cls(stream.tell(), found.hexdigest())
        except OSError as error:
            raise WaffleError(f"cannot read {path}: {error.strerror}") from None


Files: TypeAlias = dict[str, tuple[Digest, ...]]  # name -> the contents that the file may have now


class Finding(NamedTuple):
    """The result of checking a run folder. A finding with a text is an error, others are notes."""

    kind: Kind
    folder: Path
    text: str = ""


class Manifest(NamedTuple):
    """The content of a manifest, and which key signed it."""

    files: Files
    signed: Literal["here", "elsewhere", "nowhere", "wrongly"]


def seal(folder: Path) -> None:
    """Write the manifest of a folder. Call it after all other files have been written.

    Only for code that writes a finished run folder without `Run`; a `Run` keeps its manifest up to date."""
    names = [*SMALL, LOG, *LARGE, *(path.name for path in folder.glob(CHECKPOINTS))]
    _write(folder, {name: (Digest.at(folder / name),) for name in names if (folder / name).is_file()})


def verify(folder: Path, large: Sequence[str] = (), force: bool = False, warn: Warn | None = None) -> None:
    """Raise a WaffleError if files of a run folder were changed; with `force`, warn instead.

    Small files are always checked. Pass in `large` the names of large files that will be read. `warn` receives one line
    if the files are unchanged but the signature cannot be checked; by default it is a UserWarning."""
    verify_all([folder], large, force, warn)


def verify_all(
    folders: Iterable[Path], large: Sequence[str] = (), force: bool = False, warn: Warn | None = None
) -> None:
    """Like `verify` for several folders, with one warning per kind of finding."""
    found = [finding for folder in folders if (finding := inspect(folder, large))]
    refuse(found, force)
    for line in summary(found):
        if warn:
            warn(line)
        else:
            warnings.warn(line, stacklevel=3)


def no_warning(line: str) -> None:
    """Ignore a warning. Pass it as `warn` if the user has already been warned."""


def refuse(findings: Iterable[Finding], force: bool) -> None:
    """Raise the first finding that is an error, unless forced."""
    wrong = next((finding for finding in findings if finding.text), None)
    if wrong and not force:
        raise WaffleError(f"{wrong.text}: restore it, {FORCE}{ONCE if wrong.kind == 'missing' else ''}")


def summary(findings: Sequence[Finding]) -> list[str]:
    """Return one line per kind of finding."""
    kinds = dict.fromkeys(finding.kind for finding in findings)
    return [_line([finding for finding in findings if finding.kind == kind]) for kind in kinds]


def _line(findings: Sequence[Finding]) -> str:
    first, more = findings[0], len(findings) - 1
    if first.text:
        also = "have none either" if first.kind == "missing" else "were changed"
        others = f", and {more} more runs {also}" if more else ""
        return f"{first.text}{others}; used because of --force"
    which = f"{first.folder} and {more} more were" if more else f"{first.folder} was"
    their = "their" if more else "its"
    unchanged = f"{their} files are unchanged since, but the signature cannot be checked here"
    return {
        "foreign": f"{which} made with another key (on another machine or by another user): {unchanged}",
        "unsigned": f"{which} made where no key could be stored: {unchanged}",
        "missing": f"{which} made by an older version without a manifest, or it was removed",
    }[first.kind]


def inspect(folder: Path, large: Sequence[str] = ()) -> Finding | None:
    """Return the finding on a folder, or None if it is unchanged and signed with this user's key."""
    try:
        manifest = read(folder)
    except WaffleError as error:
        return Finding("changed", folder, str(error))
    if manifest is None:
        return Finding("missing", folder, _unlisted(folder))
    if manifest.signed == "wrongly":
        return Finding("changed", folder, f"{folder / NAME} was changed after it was signed with your key")
    ended = (folder / RESULT).exists()
    names = [*SMALL, *([LOG] if ended else ()), *large]  # the log of an unfinished run is checked on resume
    change = next((text for name in names if (text := difference(folder / name, manifest.files.get(name), ended))), "")
    if change:
        return Finding("changed", folder, change)
    if manifest.signed == "here":
        return None
    return Finding("foreign" if manifest.signed == "elsewhere" else "unsigned", folder)


def _unlisted(folder: Path) -> str:
    """Return the error for a folder without a manifest, empty if it holds no results yet."""
    results = [*(folder / name for name in (RESULT, LOG, *LARGE)), *folder.glob(CHECKPOINTS)]
    found = next((path.name for path in results if path.exists()), "")
    return f"{folder} has no {NAME}, so its {found} cannot be checked" if found else ""


def difference(path: Path, listed: Sequence[Digest] | None, ended: bool) -> str:
    """Return how a file differs from its listed digests, or an empty string.

    Before a run has ended a listed file may not exist yet, and the log may be longer than listed."""
    grows = path.name == LOG and not ended
    if not path.exists():
        return f"{path} is missing, though {NAME} lists it" if listed and ended else ""
    if not listed:
        return "" if grows else f"{path} was added after the run wrote its files: {NAME} does not list it"
    try:
        found = {Digest.at(path, known.size if grows else None) for known in listed}
    except WaffleError as error:
        return str(error)
    if found & set(listed):
        return ""
    return (
        f"{path} was changed or damaged after the run wrote it "
        f"(expected SHA-256 {listed[-1].sha256[:12]}, got {min(found).sha256[:12]})"
    )


class Journal:
    """The manifest of a folder to which a run is writing."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder, self.files = folder, files
        self._listed = dict(files)

    @classmethod
    def opened(cls, folder: Path) -> Journal:
        """Open the journal of a folder; it is empty if the folder has no manifest."""
        manifest = read(folder)
        return cls(folder, manifest.files if manifest else {})

    @contextlib.contextmanager
    def replacing(self, new: Mapping[str, Digest]) -> Iterator[None]:
        """List the new digests of these files together with the old ones; after the body, only the new ones."""
        both = {name: tuple(dict.fromkeys((*self.files.get(name, ()), digest))) for name, digest in new.items()}
        if any(digest not in self._listed.get(name, ()) for name, digest in new.items()):
            self._write({**self.files, **both})
        yield
        self.files = {**self.files, **{name: (digest,) for name, digest in new.items()}}

    def difference(self, path: Path) -> str:
        """Return how a file of the folder differs from its listed digests, or an empty string."""
        return difference(path, self.files.get(path.name), ended=False)

    def grown(self, name: str, digest: Digest) -> None:
        """Set the digest of an append-only file. It is written with the next manifest."""
        self.files = {**self.files, name: (digest,)}

    def forget(self, *names: str) -> None:
        """Remove files from the list. The next manifest does not list them."""
        self.files = {name: listed for name, listed in self.files.items() if name not in names}

    def compact(self) -> None:
        """Write the manifest without replaced or removed files."""
        self.files = {name: listed for name, listed in self.files.items() if (self.folder / name).exists()}
        if self.files != self._listed:
            self._write(self.files)

    def _write(self, files: Files) -> None:
        _write(self.folder, files)
        self._listed = dict(files)


def read(folder: Path) -> Manifest | None:
    """Return a folder's manifest and which key signed it, or None if there is no manifest."""
    path = check_regular(folder / NAME)
    try:
        content = json.loads(path.read_bytes())
        body = {key: content[key] for key in ("schema", "key", "files")}
        if body["schema"] != SCHEMA:
            raise WaffleError(f"{path}: expected schema {SCHEMA}, got {body['schema']!r}; update waffle-fl")
        files = {str(name): tuple(Digest(**entry) for entry in listed) for name, listed in body["files"].items()}
        signature = str(content["hmac"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except WaffleError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WaffleError(f"{path} is damaged: expected `schema`, `key`, `files` and `hmac`") from None
    if not body["key"]:
        return Manifest(files, "nowhere")
    key = user_key()
    if key is None or key_id(key) != body["key"]:
        return Manifest(files, "elsewhere")
    return Manifest(
        files, "here" if hmac.compare_digest(_signature(body, key).encode(), signature.encode()) else "wrongly"
    )


def _write(folder: Path, files: Files) -> None:
    key = user_key()
    listed = {name: [digest._asdict() for digest in digests] for name, digests in sorted(files.items())}
    body = {"schema": SCHEMA, "key": key_id(key) if key else "", "files": listed}
    content = {**body, "hmac": _signature(body, key) if key else ""}
    write_atomically(folder / NAME, (json.dumps(content, indent=2) + "\n").encode())


def _signature(body: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), "sha256").hexdigest()
