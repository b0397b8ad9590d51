"""States of agents on disk: one row per agent that has ever trained, read and written by cohorts.

A run has a store (`RunSpec.store`) if the states of its agents do not fit into memory. Files have slots of one size; an
agent that has not trained yet has the initial state and no slot. A row is never overwritten while a saved state refers
to it: a new row goes to a free slot. So a checkpoint contains only the slot and the digest of each agent's row, and
after a kill the rows of the last checkpoint are still there.
Rows are read and written by `pread` and `pwrite`: with a memory map a full disk would end the process by a signal.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net
from waffle_fl.engines.tree import tree_map
from waffle_fl.errors import WaffleError, readable_errors

FILE_BYTES = 1 << 30  # of the rows in one file
KEPT = 3  # saved states whose rows are kept: the two that a run folder keeps, and one that is being written
NO_SLOT = -1  # of an agent that has not trained yet


class StoredAgents(NamedTuple):
    """The states of all agents: where each row is, and the digest of its content."""

    slots: Tensor  # (N,), NO_SLOT for the initial state
    digests: Tensor  # (N,)


def fresh(agents: int) -> StoredAgents:
    """Return the states of agents that have not trained yet."""
    return StoredAgents(torch.full((agents,), NO_SLOT), torch.zeros(agents, dtype=torch.int64))


def initial_rows(algorithm: Algorithm, net: Net, agents: int) -> tuple[Any, Any]:
    """Return the server's state without rows of agents, and the state of one agent.

    A field of the server that has numbers per agent has them for all agents; of rows it has no columns.
    """
    (server, agent), (two, _) = algorithm.init(net, 1), algorithm.init(net, 2)
    varying = {name for name in server._fields if getattr(server, name).shape != getattr(two, name).shape}
    if not varying:
        return server, agent
    narrow, _ = algorithm.init(Net(net.params[:0], net.stats[:0]), agents)
    return server._replace(**{name: getattr(narrow, name) for name in varying}), agent


class RowStore:
    """The rows of one run, in a folder of its own, which is created when the first row is written.

    The store reads and writes whatever a `StoredAgents` refers to. The rows of the previous round stay readable until
    the next round is written, those of the latest saved states as long as they are among the last three.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[int, int] = {}  # open files by number
        self._free: deque[int] = deque()
        self._retired: list[int] = []  # slots whose rows were replaced in the latest round
        self._saved: deque[Any] = deque(maxlen=KEPT)  # the slots of saved states
        self._locked = np.zeros(0, dtype=bool)  # by slot: whether a saved state refers to it
        self._end: int | None = None  # number of slots; None before the first write

    def read(self, stored: StoredAgents, agents: Sequence[int], initial: Any) -> Any:
        """Return the states of some agents as rows; `initial` is the state, in one row, of an agent without a slot."""
        rows = tree_map(lambda field: field.cpu().repeat(len(agents), *[1] * (field.ndim - 1)), initial)
        pieces, size = _bytes_of(rows), _row_bytes(initial)
        slots = stored.slots[list(agents)].tolist() if size else []
        for k, (agent, slot) in enumerate(zip(agents, slots, strict=False)):
            if slot != NO_SLOT:
                own = [piece[k] for piece in pieces]
                self._read(own, slot, size, agent)
                if _digest(own) != int(stored.digests[agent]):
                    raise WaffleError(f"{self.folder}: the state of agent {agent} was changed or damaged{AGAIN}")
        return tree_map(lambda field, like: field.to(like.device), rows, initial)

    def write(self, stored: StoredAgents, agents: Sequence[int], rows: Any) -> StoredAgents:
        """Write the rows of these agents to free slots and return the states of all agents."""
        size, pieces = _row_bytes(rows), _bytes_of(rows)
        if not size:
            return stored
        if self._end is None:
            self._resume(stored)
        self._free.extend(self._retired)
        chosen = [self._new_slot() for _ in agents]
        digests = []
        with readable_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for k, slot in enumerate(chosen):
                own = [piece[k] for piece in pieces]
                self._write(own, slot, size)
                digests.append(_digest(own))
        numbers = torch.tensor(list(agents))
        before = stored.slots[numbers].tolist()
        self._retired = [slot for slot in before if slot != NO_SLOT and not self._is_locked(slot)]
        slots = stored.slots.index_copy(0, numbers, torch.tensor(chosen))
        return StoredAgents(slots, stored.digests.index_copy(0, numbers, torch.tensor(digests)))

    def sync(self, stored: StoredAgents) -> None:
        """Write these states to disk durably. Call it before a checkpoint refers to them."""
        with readable_errors(self.folder):
            for handle in self._files.values():
                os.fsync(handle)
        self._saved.append(_used(stored))
        if self._end is not None:
            self._locked = np.zeros(self._end, dtype=bool)
            self._locked[np.concatenate(list(self._saved))] = True
            self._retired = []
            self._free = deque(np.flatnonzero(~self._locked).tolist())

    def close(self) -> None:
        """Close all files."""
        for handle in self._files.values():
            os.close(handle)
        self._files = {}

    def delete(self) -> None:
        """Delete the folder with all rows, if there is one."""
        self.close()
        if self.folder.is_dir():
            for path in self.folder.glob("rows-*.bin"):
                path.unlink()
            self.folder.rmdir()

    def _resume(self, stored: StoredAgents) -> None:
        """Take over the slots to which a state refers; all others are free."""
        used = _used(stored)
        self._saved.append(used)
        self._end = int(used.max()) + 1 if len(used) else 0
        self._locked = np.zeros(self._end, dtype=bool)
        self._locked[used] = True
        self._free = deque(np.flatnonzero(~self._locked).tolist())

    def _is_locked(self, slot: int) -> bool:
        return slot < len(self._locked) and bool(self._locked[slot])

    def _new_slot(self) -> int:
        if self._free:
            return self._free.popleft()
        assert self._end is not None
        self._end += 1
        return self._end - 1

    def _place(self, slot: int, size: int) -> tuple[int, int]:
        """Return the open file and the offset of a slot."""
        per_file = max(1, FILE_BYTES // size)
        number, place = divmod(slot, per_file)
        if number not in self._files:
            path = self.folder / f"rows-{number:06d}.bin"
            self._files[number] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._files[number], place * size

    def _read(self, pieces: Sequence[Any], slot: int, size: int, agent: int) -> None:
        try:
            handle, offset = self._place(slot, size)
            found = os.preadv(handle, [piece.data for piece in pieces], offset)
        except OSError as error:
            raise WaffleError(f"cannot read {self.folder}: {error.strerror}") from None
        if found != size:
            raise WaffleError(f"{self.folder}: the state of agent {agent} is missing{AGAIN}")

    def _write(self, pieces: Sequence[Any], slot: int, size: int) -> None:
        handle, offset = self._place(slot, size)
        if os.pwritev(handle, [piece.data for piece in pieces], offset) != size:
            raise OSError(28, "No space left on device")


AGAIN = ": delete the run's folder to start again"


def _used(stored: StoredAgents) -> Any:
    slots = stored.slots.cpu().numpy()
    return slots[slots != NO_SLOT]


def _bytes_of(rows: Any) -> list[Any]:
    """Return the bytes of each field that has any, one row of bytes per agent; on a CPU they share memory."""
    fields = (field.detach().cpu().contiguous() for field in rows if field.numel())
    return [field.view(len(field), -1).view(torch.uint8).numpy() for field in fields]


def _row_bytes(rows: Any) -> int:
    return sum(field[:1].numel() * field.element_size() for field in rows)


def _digest(pieces: Sequence[Any]) -> int:
    """Return a signed 64-bit hash of a row."""
    found = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        found.update(piece.data)
    return int.from_bytes(found.digest(), "big", signed=True)
