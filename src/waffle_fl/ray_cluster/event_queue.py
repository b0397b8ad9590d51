"""The actor between tasks and driver. It imports nothing of this package, so that its process is small."""

from __future__ import annotations

from typing import Any

Event = tuple[Any, ...]  # a kind, the number of a run or a task, and what happened


class EventQueue:
    """Events of the tasks of several calls of the driver, and which calls are stopped."""

    def __init__(self) -> None:
        self._events: dict[int, list[Event]] = {}
        self._stopped: set[int] = set()

    def put(self, call: int, events: list[Event]) -> bool:
        """Add events of a call and return whether its tasks are to stop."""
        self._events.setdefault(call, []).extend(events)
        return call in self._stopped

    def take(self, call: int) -> list[Event]:
        """Return and remove the events of a call."""
        return self._events.pop(call, [])

    def stop(self, call: int) -> None:
        """Ask the tasks of a call to stop after their current round."""
        self._stopped.add(call)
