"""Updates as bytes: encode an agent's update, and collect and validate the replies of a round.

The sender is the agent that the transport reports; the agent and sample count stated in a reply are never read. Round,
run, model and number of steps must be the planned ones, and the tensors must have exactly the expected names, shapes
and types. An agent's `dc` is ignored: the server computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from waffle_fl.errors import WaffleError
from waffle_fl.tensorfile import MAX_HEADER, pack, unpack

IGNORED = ("dc",)
LONGEST_REASON = 300  # characters: a reason may quote the reply


@dataclass(frozen=True)
class Header:
    """The metadata that a reply must have to be accepted."""

    run: str
    round: int
    model: str

    def metadata(self, steps: int) -> dict[str, str]:
        return {"run": self.run, "round": str(self.round), "model": self.model, "steps": str(steps)}


def seal(up: Any, row: int, header: Header, steps: int) -> bytes:
    """Return one agent's update as bytes."""
    tensors = {name: value[row] for name, value in up._asdict().items()}
    return pack(tensors, header.metadata(steps))


@dataclass
class UpdateCollector:
    """The replies of one round. The first valid reply of each agent counts; everything else is logged."""

    template: Mapping[str, Tensor]  # one agent's update: names, shapes, types
    header: Header
    steps: list[int]  # K_i as planned
    rows: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    log: list[tuple[int, str]] = field(default_factory=list)

    @property
    def max_bytes(self) -> int:
        """Longest reply that is parsed: a header, and room for an ignored tensor next to each expected one."""
        return 8 + MAX_HEADER + 2 * sum(t.numel() * t.element_size() for t in self.template.values())

    def deliver(self, agent: int, payload: bytes) -> bool:
        """Validate and store a reply that the transport attributes to this agent; return whether it was accepted."""
        try:
            if len(payload) > self.max_bytes:
                raise WaffleError(f"{len(payload)} bytes, more than any update")
            if agent in self.rows:
                raise WaffleError("a second reply in one round")
            metadata, tensors = unpack(payload, self.template, IGNORED)
            for name, expected in self.header.metadata(self.steps[agent]).items():
                if metadata.get(name) != expected:
                    raise WaffleError(f"{name} is {metadata.get(name)!r}, expected {expected!r}")
        except WaffleError as error:
            self.log.append((agent, str(error)[:LONGEST_REASON]))
            return False
        self.rows[agent] = tensors
        return True

    def updates(self, kind: Any) -> tuple[Any, Tensor]:
        """Return the updates as rows in agent order, and a mask of the agents that sent one."""
        agents = range(len(self.steps))
        blank = {name: torch.zeros_like(value) for name, value in self.template.items()}
        rows = [self.rows.get(i, blank) for i in agents]
        present = torch.tensor([i in self.rows for i in agents])
        return kind(*(torch.stack([row[name] for row in rows]) for name in self.template)), present
