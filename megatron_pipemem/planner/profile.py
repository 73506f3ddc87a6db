"""Hold what the parts of a model cost on one rank, and make the costs of stages from it.

A stage is its layers and its *frame*: what it has besides, by its place in the pipeline. The first holds the embedding, the
last final norm, head and loss. Seconds, bytes and parameters of a stage are the sums of theirs, so one profile prices
every way to cut the model. Profiles come from formulas (`from_formulas`), or from running stages of Megatron's modules
(``mcore.profiling``), for real or with fake tensors.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from megatron_pipemem.config.cluster import Cluster, Link
from megatron_pipemem.config.limits import check_magnitudes
from megatron_pipemem.config.loading import typed
from megatron_pipemem.config.model import Execution, Model, Passes
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.planner import prices
from megatron_pipemem.planner.activations import message_bytes
from megatron_pipemem.planner.prices import MeasuredSlowdown, Price
from megatron_pipemem.reading import read_json
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.prices import listed

Source = Literal["formulas", "fake tensors", "measured"]


@dataclass(frozen=True)
class Part:
    """A layer or a frame, per microbatch and on one rank.

    Args:
        seconds: of F, I and W.
        memory: by how many bytes every kind of action changes what the rank holds, as the activation ledger counts.
        parameters: on the rank.
    """

    seconds: Passes = field(default_factory=Passes)
    memory: dict[Kind, float] = field(default_factory=dict)
    parameters: int = 0

    @property
    def saved(self) -> float:
        """Bytes from F to I, beside messages that come and go."""
        return self._net(Kind.F, Kind.RECV_F, Kind.SEND_F)

    @property
    def released_at_input(self) -> float:
        """Bytes that I gives back, beside messages that come and go."""
        return -self._net(Kind.I, Kind.RECV_I, Kind.SEND_I)

    def _net(self, *kinds: Kind) -> float:
        return sum(self.memory.get(kind, 0.0) for kind in kinds)

    def __add__(self, other: Part) -> Part:
        kinds = [*self.memory, *(kind for kind in other.memory if kind not in self.memory)]
        memory = {kind: self.memory.get(kind, 0.0) + other.memory.get(kind, 0.0) for kind in kinds}
        return Part(self.seconds + other.seconds, memory, self.parameters + other.parameters)

    def __mul__(self, count: int) -> Part:
        memory = {kind: change * count for kind, change in self.memory.items()}
        return Part(self.seconds * count, memory, self.parameters * count)

    def __sub__(self, other: Part) -> Part:
        return self + other * -1


@dataclass(frozen=True)
class Bandwidths:
    """Hold measured bandwidths between device and host, in 10^9 bytes per second.

    Args:
        d2h: from device to host alone.
        h2d: from host to device alone.
        both: each way, when both run.
        d2h_computing: from device to host beside matrix products.
        h2d_computing: from host to device beside matrix products.
        both_computing: each way, when both run beside matrix products.
    """

    d2h: float
    h2d: float
    both: float
    d2h_computing: float
    h2d_computing: float
    both_computing: float


@dataclass(frozen=True)
class Profile:
    """Hold the costs of one model, cut and run in one way.

    Args:
        model: its shape.
        execution: how a microbatch of it runs.
        source: where bytes and parameters are from. Measured seconds are of computing alone; ``formulas`` and ``fake tensors``
            come with the seconds of ``planner.prices``, which add tensor-, context- and expert-parallel messages.
        device: what was measured, or the speed that formulas were given.
        layers: one layer of every kind that the model has.
        first: the frame of the stage with the embedding.
        middle: of a stage in between.
        last: of the stage with the head, and with multi-token prediction.
        message_bytes: of one microbatch between two stages.
        optimizer_seconds: of one step, per parameter.
        bandwidths: to the host, where they were measured.
        end_layers: likewise of the first and the last stage, where they differ: there unfused attention gets its mask from
            the batch, elsewhere every layer makes and keeps one.
    """

    model: Model
    execution: Execution
    source: Source
    device: str
    layers: dict[str, Part]
    first: Part
    middle: Part
    last: Part
    message_bytes: float
    optimizer_seconds: float
    bandwidths: Bandwidths | None = None
    end_layers: dict[str, Part] | None = None

    @property
    def layer(self) -> Part:
        """The layer that the model has most of."""
        return self.layers[self.model.main_kind]

    def stage(self, index: int, num_stages: int, kinds: Sequence[str]) -> Part:
        """Return what a stage costs.

        Args:
            index: of the stage in the pipeline, from 0.
            num_stages: of the pipeline.
            kinds: of the stage's layers.
        """
        if num_stages == 1:
            frame = self.first + self.last - self.middle
            frame = Part(frame.seconds, {k: v for k, v in frame.memory.items() if k in _COMPUTED}, frame.parameters)
        else:
            frame = self.first if index == 0 else self.last if index == num_stages - 1 else self.middle
        layers = self.end_layers if index in (0, num_stages - 1) and self.end_layers else self.layers
        return sum((layers[kind] * count for kind, count in Counter(kinds).items()), frame)

    def costs(self, layers: Sequence[int], link: Link | None = None, placement: Placement | None = None) -> Costs:
        """Return seconds and bytes of a pipeline, for its simulator, searches and ``--pipemem-costs``.

        Args:
            layers: of every stage, in model order.
            link: between two devices; messages take no time without one.
            placement: which device holds which stage. Stages that follow each other on one device hand tensors over, and no
                message; without a placement none do.

        Raises:
            ConfigError: they are not the model's layers.
        """
        if sum(layers) != self.model.layers or min(layers) < 0:
            raise ConfigError(f"stages of {list(layers)} layers are not the {self.model.layers} of the model")
        kinds, ends = self.model.kinds, list(accumulate(layers))
        stages = [self.stage(i, len(layers), kinds[ends[i] - count : ends[i]]) for i, count in enumerate(layers)]
        devices = range(len(stages)) if placement is None else placement.devices
        for index in range(1, len(stages)):
            if devices[index - 1] == devices[index]:
                stages[index - 1 : index + 1] = _handing_over(*stages[index - 1 : index + 1])
        actions = dict.fromkeys(kind for stage in stages for kind in stage.memory)
        return Costs(
            tuple(stage.seconds.forward for stage in stages),
            tuple(stage.seconds.input for stage in stages),
            tuple(stage.seconds.weight for stage in stages),
            0.0 if link is None else link.seconds(self.message_bytes),
            {kind: tuple(stage.memory.get(kind, 0.0) for stage in stages) for kind in actions},
        )

    def slowdown(self, cluster: Cluster) -> MeasuredSlowdown:
        """Return how much longer computing took on a device of this cluster than ``planner.prices`` says.

        Raises:
            ConfigError: nothing was measured.
        """
        if self.source != "measured":
            raise ConfigError(f"its seconds are from {self.source}, not measured; run `pipemem profile` on a device")

        def longer(part: Part, price: Price) -> Passes:
            computing = price.seconds + price.communication * -1
            return prices.each_pass(operator.truediv, part.seconds, computing)

        return MeasuredSlowdown(
            layer=longer(self.layer, prices.layer(self.model, self.execution, cluster, self.model.main_kind)),
            head=longer(self.last, prices.last(self.model, self.execution, cluster)),
        )

    def to_json(
        self, layers: Sequence[int], link: Link | None = None, placement: Placement | None = None
    ) -> dict[str, Any]:
        """Return what ``--pipemem-costs FILE`` reads, with this profile under the key ``profile``.

        Args:
            layers: of every stage.
            link: that messages go over; ``None`` prices none.
            placement: of the stages; ``None`` is one stage per device.
        """
        costs = self.costs(layers, link, placement)
        return {
            "forward": list(listed(costs.forward)),
            "backward_input": list(listed(costs.backward_input)),
            "backward_weight": list(listed(costs.backward_weight)),
            "p2p": costs.p2p,
            "memory": {str(kind): list(listed(changes)) for kind, changes in (costs.memory or {}).items()},
            "profile": {**asdict(self), "layers_per_stage": list(layers)},
        }

    @classmethod
    def from_json(cls, path: str | Path) -> Profile:
        """Read the file that ``pipemem profile --output`` wrote.

        Raises:
            ConfigError: it cannot be read, or holds no profile.
        """
        whole = read_json(path, "a profile")
        try:
            if not isinstance(whole, dict) or not isinstance(whole.get("profile"), dict):
                raise ConfigError("it lacks an object under the key 'profile'")
            check_magnitudes(whole["profile"])
            apart = ("layers_per_stage", "offload_ratio")
            found = typed({key: value for key, value in whole["profile"].items() if key not in apart}, cls)
            if missing := set(found.model.kinds) - set(found.layers):
                raise ConfigError(f"lacks the model's layers of kind {min(missing)!r}", key="layers")
            return found
        except ConfigError as error:
            where = "" if error.key is None else f"profile.{error.key}: "
            raise ConfigError(f"holds no profile of `pipemem profile`: {where}{error.message}", file=path) from error


_COMPUTED = frozenset((Kind.F, Kind.I, Kind.W))  # a stage alone exchanges no messages


def from_formulas(model: Model, execution: Execution, cluster: Cluster) -> Profile:
    """Return the profile that the planner's prices make, of which nothing was run.

    Args:
        model: the shape.
        execution: how it runs.
        cluster: its speeds and links make seconds of FLOPs and bytes.
    """
    message = message_bytes(model, execution)
    # The ledger counts a layer's input as the message it came as, and so does the frame of the first stage.
    # What a stage exchanges with the one before it and with the one behind it. A result counts until it is sent.
    before = Part(memory={Kind.RECV_F: message, Kind.F: -message, Kind.I: message, Kind.SEND_I: -message})
    behind = Part(memory={Kind.F: message, Kind.SEND_F: -message, Kind.RECV_I: message, Kind.I: -message})
    return Profile(
        model=model,
        execution=execution,
        source="formulas",
        device=speed(cluster),
        layers={kind: _priced(prices.layer(model, execution, cluster, kind)) for kind in dict.fromkeys(model.kinds)},
        first=_priced(prices.embedding(model, execution, cluster)) + behind,
        middle=before + behind,
        last=_priced(prices.last(model, execution, cluster)) + before,
        message_bytes=message,
        optimizer_seconds=prices.adam_seconds(cluster),
    )


def speed(cluster: Cluster) -> str:
    """Return how fast formulas take a device to be, in words."""
    return f"{cluster.tflops:g} TFLOP/s peak, {cluster.achieved:.0%} of it achieved"


def even_layers(layers: int, num_stages: int) -> list[int]:
    """Return the layers of every stage: as many on each, one fewer on the last ones where they do not come out even."""
    whole, rest = divmod(layers, num_stages)
    return [whole + (stage < rest) for stage in range(num_stages)]


def _handing_over(before: Part, after: Part) -> tuple[Part, Part]:
    """Return two neighbouring stages of one device: what would be received is there as soon as the neighbour has made
    it, and nothing is sent.
    """
    changed, gave = dict(before.memory), dict(after.memory)
    changed[Kind.F] += gave.pop(Kind.RECV_F, 0.0) + changed.pop(Kind.SEND_F, 0.0)
    gave[Kind.I] += changed.pop(Kind.RECV_I, 0.0) + gave.pop(Kind.SEND_I, 0.0)
    return replace(before, memory=changed), replace(after, memory=gave)


def _priced(price: Price) -> Part:
    kept = price.kept
    memory = {Kind.F: kept.saved, Kind.I: kept.after_input - kept.saved, Kind.W: -kept.after_input}
    return Part(price.seconds, memory, price.parameters)
