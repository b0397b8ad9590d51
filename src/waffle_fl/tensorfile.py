"""Safetensors files from untrusted sources: every name, shape, type and size is checked before allocation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from waffle_fl.atomic_files import check_regular, write_atomically
from waffle_fl.errors import WaffleError

MAX_HEADER = 1 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "BOOL": torch.bool}
WIDTHS = {"F64": 8, "F32": 4, "I64": 8, "BOOL": 1}


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return tensors, metadata and a digest of both as safetensors. Equal input gives equal bytes."""
    on_cpu = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    payload = save(on_cpu)
    length = int.from_bytes(payload[:8], "little")
    labels = dict(sorted({**metadata, "digest": digest(on_cpu, metadata)}.items()))
    header = {"__metadata__": labels, **json.loads(payload[8 : 8 + length])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + payload[8 + length :]


def unpack(
    payload: bytes, template: Mapping[str, Tensor], ignored: tuple[str, ...] = ()
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return (metadata, tensors) of a payload; names, shapes and types must match the template, except `ignored`."""
    header = parse_header(payload[: 8 + MAX_HEADER], len(payload))
    metadata = header.pop("__metadata__", {})
    found = {name: (e["dtype"], tuple(e["shape"])) for name, e in header.items() if name not in ignored}
    expected = {name: (_dtype_name(t), tuple(t.shape)) for name, t in template.items()}
    if found != expected:
        name = sorted(set(found.items()) ^ set(expected.items()))[0][0]
        raise WaffleError(f"{name!r} is {found.get(name, 'missing')}, expected {expected.get(name, 'no such tensor')}")
    try:
        tensors = load(payload)
        found_digest = digest(tensors, metadata)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise WaffleError(f"damaged ({error})") from None
    if metadata.get("digest") != found_digest:
        raise WaffleError("damaged (the content does not match its digest)")
    return metadata, {name: tensors[name] for name in template}


def parse_header(prefix: bytes, size: int) -> dict[str, Any]:
    """Return the header of a payload of `size` bytes that begins with `prefix`. Sizes must match types and shapes."""
    length = int.from_bytes(prefix[:8], "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise WaffleError("not a safetensors file: its header is too long")
    try:
        header = json.loads(prefix[8 : 8 + length])
        end = 0
        for name, entry in header.items():
            if name == "__metadata__":
                if not all(isinstance(value, str) for value in entry.values()):
                    raise ValueError("metadata")
                continue
            begin, stop = entry["data_offsets"]
            count = 0 if 0 in entry["shape"] else 1
            for dimension in entry["shape"]:
                if type(dimension) is not int or dimension < 0:  # before the product: an int times a string is a string
                    raise ValueError("shape")
                count *= dimension
                if count > size:  # before the product has a million digits
                    raise ValueError("shape")
            if type(begin) is not int or begin < 0 or stop - begin != count * WIDTHS[entry["dtype"]]:
                raise ValueError("offsets")
            end = max(end, stop)
        if end != size - 8 - length:
            raise ValueError("length")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WaffleError("not a safetensors file: its header is damaged") from None
    return header  # type: ignore[no-any-return]


def write_tensors(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    write_atomically(path, pack(tensors, metadata))


def read_tensors(path: Path, template: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return (metadata, tensors) of a file that must match the template exactly."""
    expected = sum(t.numel() * t.element_size() for t in template.values())
    check_regular(path)
    try:
        if path.stat().st_size > 8 + MAX_HEADER + expected:
            raise WaffleError("larger than this run's state can be")
        return unpack(path.read_bytes(), template)
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except WaffleError as error:
        raise WaffleError(f"{path}: {error}") from None


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a file, as its header states them; nothing but the header is read."""
    check_regular(path)
    try:
        with path.open("rb") as stream:
            header = parse_header(stream.read(8 + MAX_HEADER), path.stat().st_size)
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except WaffleError as error:
        raise WaffleError(f"{path}: {error}") from None
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def read_named(path: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a file, given only their names. Their sizes must add up to the size of the file."""
    check_regular(path)
    try:
        payload = path.read_bytes()
        header = parse_header(payload[: 8 + MAX_HEADER], len(payload))
        known = {n: e for n, e in header.items() if n in names and e["dtype"] in DTYPES}
        return unpack(payload, {n: torch.empty(e["shape"], dtype=DTYPES[e["dtype"]]) for n, e in known.items()})[1]
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except WaffleError as error:
        raise WaffleError(f"{path}: {error}") from None


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return a hash of names, contents, and all metadata except the digest itself."""
    h = hashlib.blake2b(digest_size=16)
    h.update(repr(sorted((key, value) for key, value in metadata.items() if key != "digest")).encode())
    for name in sorted(tensors):
        h.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return h.hexdigest()


def _dtype_name(tensor: Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
