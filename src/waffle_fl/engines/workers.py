"""Backend part: worker processes, forked once, that divide the rounds of a simulation among the cores of a CPU.

What it does   `RunWorkers` divides runs among processes; `RowTraining` divides the rows of few runs in the same way
When           on a CPU with several cores, once the rounds measured so far are long enough to win back the start
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

ROUND = 0.01  # seconds that a round must take for workers to gain more than the handing over costs
START = 0.2  # seconds that workers must save in all, to be worth their start
WARM_UP = 0.3  # seconds of a first round that say nothing of the next ones
NO_MEMORY = 12  # the exit status of a worker that ran out of it
_COMMAND = struct.Struct("qq")  # round, attempt
KEPT = 1 << 28  # bytes of freed memory that a process keeps: each step needs again what the one before gave back
MAPPED = 1 << 25  # bytes from which on memory is asked of the system piece by piece; the C library allows no more
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h has them


class WorkerPolicy:
    """Whether workers would pay, judged by the seconds that a round takes without them."""

    def __init__(self, cores: int) -> None:
        can_fork = hasattr(os, "fork") and not torch.cuda.is_available()  # autograd has threads for a GPU
        self.cores = cores if can_fork else 1
        self._seconds = -math.inf

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A round without workers; the first also warms up, so that only a long one tells anything."""
        began = time.perf_counter() + (WARM_UP if self._seconds == -math.inf else 0)
        yield
        self._seconds = time.perf_counter() - began

    def pays(self, rounds_left: int) -> bool:
        saved = self._seconds * (1 - 1 / self.cores)
        return self._seconds > ROUND and saved * rounds_left > START


def shared(state: Any) -> Any:
    """A copy of a state in memory that workers and their parent both see."""
    return tree_map(_shared, state)


def _shared(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return tensor
    memory = mmap.mmap(-1, tensor.numel() * tensor.element_size())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


class Workers:
    """One piece of work, in shares that are done at the same time: the first here, each other one by its own process.

    A worker is forked once and inherits all that stays as it is; what changes from round to round lies in shared
    memory. It waits for a round's number, does its share, says so, and waits again. It ends when its parent closes or
    is gone; what a terminal or a service manager wants to stop is the parent's to decide.
    """

    def __init__(self, work: Work, shares: int) -> None:
        self._work = work
        self._sockets: dict[int, socket.socket] = {}  # by process
        _keep_freed_memory()
        for share in range(1, shares):
            self._start(share)

    def _start(self, share: int) -> None:
        ours, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # and so it stays there
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a worker touches nothing that a thread could hold
                process = os.fork()
            if not process:
                _serve(self._work, share, theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._sockets[process] = ours

    def __call__(self, r: int, attempt: int) -> None:
        """Do all shares of a round."""
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
        why = "is there enough memory?" if code in (NO_MEMORY, -signal.SIGKILL) else "its traceback stands above"
        raise RuntimeError(f"a training process ended with status {code}: {why}")

    def close(self) -> None:
        """End all workers, wherever they are in their work: nothing is theirs to lose."""
        for process, connection in self._sockets.items():
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            connection.close()
        self._sockets = {}


def _serve(work: Work, share: int, connection: socket.socket) -> None:
    """A worker's life. What it inherited is never collected: that would copy its pages, and could end other workers."""
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
    """Memory that goes back to the system after every step comes again as pages of zeros, a tenth of a small step."""
    allocate = getattr(ctypes.CDLL(None), "mallopt", None)  # of the GNU C library
    if allocate:
        allocate(_TRIM_THRESHOLD, KEPT)
        allocate(_MMAP_THRESHOLD, MAPPED)


def _close_all_but(connection: int) -> None:
    """Close all other files but the standard ones: a lock that the parent holds on one must end with the parent."""
    os.closerange(3, connection)
    os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
