"""Backend part: worker processes, forked once, that divide the rounds of a simulation among the cores of a CPU.

What it does   `RunWorkers` divides runs among processes; `RowTraining` divides the rows of a few runs
When           on a CPU with several cores, once measured rounds are long enough to repay the start of the processes
What it gains  1.6 x on LeNet-5, 1.6 x on the digits grid, with two cores
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import signal
import socket
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from waffle_fl.engines.tree import tree_map
from waffle_fl.out_of_memory import is_shortage

Work = Callable[[int, int, int], None]  # (share, round, attempt)

ROUND = 0.01  # seconds: in shorter rounds the communication with workers costs more than they save
START = 0.2  # seconds that workers must save in total to repay their start
WARM_UP = 0.3  # seconds of the first round that are warm-up
NO_MEMORY = 12  # exit status of a worker that ran out of memory
_COMMAND = struct.Struct("qq")  # round, attempt
KEPT = 1 << 28  # bytes of freed memory that a process keeps: each step needs again what the previous one freed
MAPPED = 1 << 25  # bytes from which an allocation is mapped separately; the largest value the C library allows
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


class WorkerPolicy:
    """Decides whether workers are worth starting, from the seconds that a round takes without them."""

    def __init__(self, cores: int) -> None:
        can_fork = hasattr(os, "fork") and not torch.cuda.is_available()  # forking breaks autograd's GPU threads
        self.cores = cores if can_fork else 1
        self._seconds = -math.inf

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure a round without workers; of the first, the warm-up is subtracted."""
        began = time.perf_counter() + (WARM_UP if self._seconds == -math.inf else 0)
        yield
        self._seconds = time.perf_counter() - began

    def pays(self, rounds_left: int) -> bool:
        saved = self._seconds * (1 - 1 / self.cores)
        return self._seconds > ROUND and saved * rounds_left > START


def shared(state: Any) -> Any:
    """Return a copy of a state in memory shared by the workers and their parent."""
    return tree_map(_shared, state)


def _shared(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return tensor
    memory = mmap.mmap(-1, tensor.numel() * tensor.element_size())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


class Workers:
    """Work in shares that run in parallel: the first in this process, the others in a process each.

    A worker is forked once and inherits all constant data; what changes from round to round is in shared memory. It
    waits for the number of a round, computes its share, reports, and waits again. It ends when its parent closes it or
    has ended. It ignores SIGINT and SIGTERM: the parent handles these.
    """

    def __init__(self, work: Work, shares: int) -> None:
        self._work = work
        self._sockets: dict[int, socket.socket] = {}  # by process
        _keep_freed_memory()
        for share in range(1, shares):
            self._start(share)

    def _start(self, share: int) -> None:
        ours, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # the child inherits it
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a worker uses no lock that a thread could hold
                process = os.fork()
            if not process:
                _serve(self._work, share, theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._sockets[process] = ours

    def __call__(self, r: int, attempt: int) -> None:
        """Compute all shares of a round."""
        for process, connection in self._sockets.items():
            try:
                connection.sendall(_COMMAND.pack(r, attempt))
            except ConnectionError:
                self._raise_ended(process)
        self._work(0, r, attempt)
        for process, connection in self._sockets.items():
            try:
                done = connection.recv(1)
            except ConnectionError:
                done = b""
            if not done:
                self._raise_ended(process)

    def _raise_ended(self, process: int) -> None:
        self._sockets.pop(process).close()
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        why = "is there enough memory?" if code in (NO_MEMORY, -signal.SIGKILL) else "see its traceback above"
        raise RuntimeError(f"a training process ended with status {code}: {why}")

    def close(self) -> None:
        """Kill all workers, also during work: they hold nothing that must be saved."""
        for process, connection in self._sockets.items():
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            connection.close()
        self._sockets = {}


def _serve(work: Work, share: int, connection: socket.socket) -> None:
    """The main loop of a worker.

    Inherited objects are never garbage collected: that would copy their pages, and could end other workers.
    """
    code = 1
    try:
        gc.freeze()
        _close_all_but(connection.fileno())
        while command := connection.recv(_COMMAND.size, socket.MSG_WAITALL):
            work(share, *_COMMAND.unpack(command))
            connection.sendall(b".")
        code = 0
    except ConnectionError:
        code = 0
    except BaseException as error:
        if is_shortage(error):
            code = NO_MEMORY
        else:
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _keep_freed_memory() -> None:
    """Keep freed memory in the process: to get it back from the system costs a tenth of a small step."""
    allocate = getattr(ctypes.CDLL(None), "mallopt", None)  # of the GNU C library
    if allocate:
        allocate(_TRIM_THRESHOLD, KEPT)
        allocate(_MMAP_THRESHOLD, MAPPED)


def _close_all_but(connection: int) -> None:
    """Close all files but this one and the standard ones, so that the parent's file locks end with the parent."""
    os.closerange(3, connection)
    os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
