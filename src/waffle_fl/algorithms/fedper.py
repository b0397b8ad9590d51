"""FedPer (Arivazhagan et al. 2019): the body of the network is averaged, the last layers are personal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, final

from waffle_fl.algorithms import fedavg, partial_sharing
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round
from waffle_fl.algorithms.fedavg import Down, Info, Local, Server, Up, Weighting
from waffle_fl.algorithms.partial_sharing import Agents, Parts
from waffle_fl.constraints import at_least, check_fields, model_dependent, parameter
from waffle_fl.models.layers import Layers


@final
@dataclass(frozen=True)
class FedPer:
    """A model for every agent: a shared body and a personal head, trained together."""

    about: ClassVar[About] = About(
        name="fedper",
        title="FedPer",
        trains_model_for="each agent",
        in_words="a shared network with personal last layers",
        cite="Arivazhagan et al., arXiv:1912.00818, 2019",
        order=120,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    head_layers: int = parameter(1, at_least(0))
    """Number of last layers that are personal: 0 is FedAvg, all layers is Local."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally, or by their number of samples as in the paper."""
    parts: Parts = model_dependent(Parts())

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> FedPer:
        return replace(self, parts=partial_sharing.parts(layers, layers.head(self.head_layers)))

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return partial_sharing.start(self.parts, net, agents)

    def broadcast(self, server: Server, agents: int) -> Down:
        return fedavg.send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        return fedavg.begin(self.sgd, partial_sharing.full_model(self.parts, down, agents))

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return partial_sharing.finish(self.parts, down, Net(local.y, local.stats))

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.aggregate(server, up, now, self.weighting)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return partial_sharing.personal(self.parts, server, agents, count)
