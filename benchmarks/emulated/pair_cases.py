"""The cases of steps with experts: sizes, seconds of layers and exchanges, and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.conflicts import make_request
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.planner import prices

CHUNKS = 2
SCHEDULES = ("zbv", "dualpipe-v")
CAPS = (1.25, 1.5)
"""Memory caps of searched orders, in activation units. Stock's interleaved schedule with pairs needs 1.5."""
OVERLAP, DELAYED = "interleaved, pairs", "interleaved, pairs, late W"


@dataclass(frozen=True)
class Block:
    """The seconds of one layer: of attention with the shared expert, of its experts, and of one exchange of tokens.

    A layer exchanges tokens twice in F and twice in I.
    """

    attention: Passes
    experts: Passes
    exchange: float


@dataclass(frozen=True)
class Case:
    """Steps of one model with one share of exchanges.

    Args:
        model: name of the model whose layers are priced.
        share: the part of F and I in which tokens travel. F and I send as many.
        devices: pipeline ranks.
        microbatches: of a step.
        layers: of a chunk.
        unit: seconds of F of a device's whole share.
        repeats: measured steps of every row.
    """

    model: str
    share: float
    devices: int
    microbatches: int
    layers: int
    unit: float
    repeats: int

    def block(self) -> Block:
        """Return the seconds of a layer: computing in the proportions that the planner predicts on an H100."""
        model, cluster = load(self.model, Model), load("h100-80g", Cluster)
        routed = replace(model, shared_expert_ffn=0)
        everything, attention, experts = (
            prices.layer(shape, Execution(), cluster, kind).seconds
            for shape, kind in ((model, model.main_kind), (model, model.main_kind[0]), (routed, model.main_kind[1]))
        )
        shared = everything + (attention + experts) * -1
        attention += shared
        exchange = self.share / (1 - self.share) * (everything.forward + everything.input) / 4
        scale = self.unit / (CHUNKS * self.layers) / (everything.forward + 2 * exchange)
        return Block(attention * scale, experts * scale, exchange * scale)

    def costs(self) -> Costs:
        """Return the costs of a device's whole share, as a run's costs file has them."""
        block, layers = self.block(), CHUNKS * self.layers
        computing, exchanges = (block.attention + block.experts) * layers, 2 * block.exchange * layers
        return Costs(
            computing.forward + exchanges,
            computing.input + exchanges,
            computing.weight,
            forward_exchange=exchanges,
            backward_exchange=exchanges,
        )

    def schedules(self) -> Iterator[Schedule]:
        """Yield every schedule without and with pairs, and the orders with pairs that a search finds under each cap."""
        for name in SCHEDULES:
            yield self.chosen(name)
            yield replace(self.chosen(name, pairs=True), name=f"{name}, pairs")
        for cap in CAPS:
            yield replace(self.chosen("auto", memory_cap=cap, pairs=True), name=f"auto {cap:g}, pairs")

    def chosen(self, name: str, **settings: Any) -> Schedule:
        """Return the schedule that a run with these settings takes."""
        shape = Shape(self.devices, CHUNKS, self.microbatches)
        return choose(make_request(name, **settings), shape, Knowledge(self.costs())).schedule
