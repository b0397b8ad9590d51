"""FedBN (Li et al. 2021): all layers are averaged except batch normalisation, which stays at the agent."""

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
class FedBN:
    """A model for every agent: shared layers with personal batch normalisation."""

    about: ClassVar[About] = About(
        name="fedbn",
        title="FedBN",
        trains_model_for="each agent",
        in_words="a shared network with personal batch normalisation layers",
        cite="Li et al., ICLR 2021",
        order=140,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally, as the authors do, or by their number of samples."""
    parts: Parts = model_dependent(Parts())

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> FedBN:
        return replace(self, parts=partial_sharing.parts(layers, layers.batch_norms))

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
