"""Is a run folder what it was? manifest.json holds the SHA-256 of its files and is signed with the user's own key.

A file is listed before it is written, beside the digest of what it replaces (`Journal.replacing`). So a process may die
between any two writes: what lies in the folder is always listed, and a listed file that is not there yet is no change.
The key is in `user_key.py`. Another user's signature cannot be checked here, only the digests.
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
SMALL = ("config.json", "provenance.json", "preprocessing.json", RESULT)  # always checked
LARGE = ("model.safetensors", "predictions.safetensors")  # checked by those who read them
CHECKPOINTS = "checkpoint-*.safetensors"
BLOCK = 1 << 20

Kind: TypeAlias = Literal["changed", "foreign", "unsigned", "missing"]
Warn: TypeAlias = Callable[[str], None]
FORCE = "or go on with --force (in Python force=True)"
ONCE = "; a run of an older version never had one: `waffle resume RUN --force` once writes it"


class Digest(NamedTuple):
    """What a file holds. A log that still grows begins with it."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Digest:
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def at(cls, path: Path, size: int | None = None) -> Digest:
        """The digest of a file, or of what it begins with."""
        found, left = hashlib.sha256(), sys.maxsize if size is None else size
        try:
            with check_regular(path).open("rb") as stream:
                while block := stream.read(min(left, BLOCK)):
                    found.update(block)
                    left -= len(block)
                return cls(stream.tell(), found.hexdigest())
        except OSError as error:
            raise WaffleError(f"cannot read {path}: {error.strerror}") from None


Files: TypeAlias = dict[str, tuple[Digest, ...]]  # by name, each content that it may have now


class Finding(NamedTuple):
    """What is to be said of a run folder; one with a text is an error."""

    kind: Kind
    folder: Path
    text: str = ""


class Manifest(NamedTuple):
    """A manifest as it was read."""

    files: Files
    signed: Literal["here", "elsewhere", "nowhere", "wrongly"]


def seal(folder: Path) -> None:
    """Write the manifest of a folder whose files are all there: call it last, when nothing else will be written.

    For code that writes a finished run folder by itself. What a `Run` writes is listed as it is written."""
    names = [*SMALL, LOG, *LARGE, *(path.name for path in folder.glob(CHECKPOINTS))]
    _write(folder, {name: (Digest.at(folder / name),) for name in names if (folder / name).is_file()})


def verify(folder: Path, large: Sequence[str] = (), force: bool = False, warn: Warn | None = None) -> None:
    """Raise a WaffleError if a run folder is not what it was; with `force` that is a warning.

    Small files are always checked, `large` ones only if named: name those that are about to be read. `warn` receives
    one line where the files are unchanged but the signature cannot be checked; by default it is a UserWarning."""
    verify_all([folder], large, force, warn)


def verify_all(
    folders: Iterable[Path], large: Sequence[str] = (), force: bool = False, warn: Warn | None = None
) -> None:
    """Like `verify`, with one warning for each kind of finding and not for each folder."""
    found = [finding for folder in folders if (finding := inspect(folder, large))]
    refuse(found, force)
    for line in summary(found):
        if warn:
            warn(line)
        else:
            warnings.warn(line, stacklevel=3)


def no_warning(line: str) -> None:
    """What to pass as `warn` where the user has been warned already."""


def refuse(findings: Iterable[Finding], force: bool) -> None:
    """Raise the first finding that is an error, unless forced."""
    wrong = next((finding for finding in findings if finding.text), None)
    if wrong and not force:
        raise WaffleError(f"{wrong.text}: restore it, {FORCE}{ONCE if wrong.kind == 'missing' else ''}")


def summary(findings: Sequence[Finding]) -> list[str]:
    """One line for each kind of finding."""
    kinds = dict.fromkeys(finding.kind for finding in findings)
    return [_line([finding for finding in findings if finding.kind == kind]) for kind in kinds]


def _line(alike: Sequence[Finding]) -> str:
    first, more = alike[0], len(alike) - 1
    if first.text:
        alike_too = "have none either" if first.kind == "missing" else "are not what they were"
        others = f", and {more} more runs {alike_too}" if more else ""
        return f"{first.text}{others}; used nevertheless, as --force says"
    who = f"{first.folder} and {more} more were" if more else f"{first.folder} was"
    whose = "their" if more else "its"
    unchanged = f"{whose} files are unchanged since, but the signature cannot be checked here"
    return {
        "foreign": f"{who} made with another key (on another machine or by another user): {unchanged}",
        "unsigned": f"{who} made where no key could be kept: {unchanged}",
        "missing": f"{who} made by an older version without a manifest, or it was removed",
    }[first.kind]


def inspect(folder: Path, large: Sequence[str] = ()) -> Finding | None:
    """What is to be said of a folder, or None if it is as it was and signed here."""
    try:
        manifest = read(folder)
    except WaffleError as error:
        return Finding("changed", folder, str(error))
    if manifest is None:
        return Finding("missing", folder, _unlisted(folder))
    if manifest.signed == "wrongly":
        return Finding("changed", folder, f"{folder / NAME} was changed after it was signed with your key")
    ended = (folder / RESULT).exists()
    names = [*SMALL, *([LOG] if ended else ()), *large]  # a log that grows is checked by those who go on from it
    odd = next((text for name in names if (text := difference(folder / name, manifest.files.get(name), ended))), "")
    if odd:
        return Finding("changed", folder, odd)
    if manifest.signed == "here":
        return None
    return Finding("foreign" if manifest.signed == "elsewhere" else "unsigned", folder)


def _unlisted(folder: Path) -> str:
    """What is wrong with a folder without a manifest: nothing where it holds no results yet."""
    results = [*(folder / name for name in (RESULT, LOG, *LARGE)), *folder.glob(CHECKPOINTS)]
    found = next((path.name for path in results if path.exists()), "")
    return f"{folder} has no {NAME}, so nothing tells whether its {found} is what the run wrote" if found else ""


def difference(path: Path, listed: Sequence[Digest] | None, ended: bool) -> str:
    """In what a file is not as it was listed, or nothing.

    Before a run has ended a file need not be there yet, and its log need only begin as it was listed."""
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
    """The manifest of a folder that is being written."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder, self.files = folder, files
        self._listed = dict(files)

    @classmethod
    def opened(cls, folder: Path) -> Journal:
        """The journal of a folder; of one without a manifest it is empty."""
        manifest = read(folder)
        return cls(folder, manifest.files if manifest else {})

    @contextlib.contextmanager
    def replacing(self, new: Mapping[str, Digest]) -> Iterator[None]:
        """List what these files are about to hold beside what they hold; after the body they hold the new."""
        both = {name: tuple(dict.fromkeys((*self.files.get(name, ()), digest))) for name, digest in new.items()}
        if any(digest not in self._listed.get(name, ()) for name, digest in new.items()):
            self._write({**self.files, **both})
        yield
        self.files = {**self.files, **{name: (digest,) for name, digest in new.items()}}

    def difference(self, path: Path) -> str:
        """In what a file of the folder is not as it was listed, or nothing."""
        return difference(path, self.files.get(path.name), ended=False)

    def grown(self, name: str, digest: Digest) -> None:
        """Note what a file that only grows begins with; the next manifest lists it."""
        self.files = {**self.files, name: (digest,)}

    def forget(self, *names: str) -> None:
        """Note that files are gone; the next manifest does not list them."""
        self.files = {name: listed for name, listed in self.files.items() if name not in names}

    def settle(self) -> None:
        """Write the manifest without what was replaced or removed."""
        self.files = {name: listed for name, listed in self.files.items() if (self.folder / name).exists()}
        if self.files != self._listed:
            self._write(self.files)

    def _write(self, files: Files) -> None:
        _write(self.folder, files)
        self._listed = dict(files)


def read(folder: Path) -> Manifest | None:
    """A folder's manifest and whose signature it bears; None if there is none."""
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
