"""Predict a run on a placement: costs of its stages, bytes of its ranks, and seconds of a step outside the pipeline.

A step takes the makespan of the schedule, then the part of the data-parallel reduction that no computing hides, then
the optimizer:

* with the distributed optimizer every rank reduces the gradients of its shard, and gathers parameters, over the
  data-parallel (and context-parallel) ranks. Without it all gradients are reduced. The backward of the last microbatch
  may hide the reduction, and the forward of the first may hide the gather. The rest is exposed;
* the optimizer reads and writes gradients, master parameters and moments of the rank's shard once, on the device or
  the host;
* a message of the pipeline holds one microbatch's activations. It stays within a node if both ranks do, with ranks in
  Megatron's order: tensor, context, data, pipeline.

Bytes of a rank are parameters, gradients, the optimizer or its shard (``parameter_bytes``), the activations that the
schedule keeps, sent messages, and buffers. The output of a stage is kept until an answer shows that it was used
(``schedule.message_memory``), so there is about one for each microbatch whose activations are kept. Buffers are other
messages, NCCL's own, the logits' gradient on the rank of the head, and the activations of the layers that are
recomputed together. The optimizer's step copies tensors when no activations are held, but CUDA graphs keep the memory of
the activations for the next step. If
the devices hold several replicas of the model, all of that exists once per replica, but a microbatch runs through only
one of them. The gradients of the replicas are summed, two ranks at a time, before the reduction, and no computing is
left to hide either. If a step may be rolled back, its previous state takes memory on the device or the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from operator import add, attrgetter
from typing import TYPE_CHECKING

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.model.activations import KeptBytes, layer_bytes, message_bytes, places_of
from megatron_pipemem.model.counts import model_flops
from megatron_pipemem.model.layout import needed_layers
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.part_costs import Passes, Summed
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.message_memory import nccl_bytes
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import listed
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner import prices
from megatron_pipemem.tools.planner.parameter_bytes import ParameterBytes, parameter_bytes
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown, Price

if TYPE_CHECKING:
    from megatron_pipemem.model.partition import Loads

_OTHER_MESSAGES = 2
"""Messages per stage that arrive, or that are sent gradients. With one sent output per kept microbatch, this is the least
that covers the fullest rank of every family."""
_MESSAGES_OF_GRAPHS = 2
"""Messages that a step of CUDA graphs holds in addition (``benchmarks/allocator.py --graphs``): the result of a pass, and its
copy before it is sent."""


@dataclass(frozen=True)
class PlannedStep:
    """The predicted costs, bytes and seconds of a step that do not depend on the order of passes."""

    placement: Placement
    layers: tuple[int, ...]  # pieces of every stage of one replica of the model
    offloaded_bytes: tuple[float, ...]  # per stage, bytes that offload of a microbatch's activations moves each way
    costs: Costs  # seconds of F, I and W, bytes, messages
    weight_bytes: tuple[float, ...]  # per device, bytes of one version of the parameters
    static_bytes: tuple[float, ...]  # per device, bytes that are always held
    buffer_bytes: tuple[float, ...]  # per device, bytes besides activations that are held at times
    sent_share: tuple[float, ...]  # per device, bytes of sent messages for each byte of activations
    communication_seconds: tuple[float, ...]
    """Per device, seconds per microbatch in tensor-, context- and expert-parallel messages."""
    exchange_seconds: tuple[Passes, ...]
    """Per stage, seconds of F and of I in which the experts' tokens travel; part of ``costs``."""
    recompute_seconds: tuple[float, ...]  # per device, seconds per microbatch of recomputation
    work_seconds: tuple[float, ...]  # per device, seconds of F, I and W per microbatch, with those messages
    reduction_seconds: float  # exposed seconds of data-parallel messages, on the worst device
    optimizer_seconds: float  # seconds, on the worst device
    rollback_bytes: tuple[float, ...]
    """Per device, bytes of the state for a rollback; part of ``static_bytes``."""
    optimizer_step_bytes: tuple[float, ...]
    """Per device, further bytes during the optimizer's step, when no activations are held; part of ``static_bytes`` if CUDA
    graphs keep their memory."""
    host_optimizer_bytes: tuple[float, ...]  # per device, bytes of the optimizer on its host
    host_bytes: float = inf  # bytes of host memory for a rank's activations

    @property
    def saved_bytes(self) -> Sequence[float]:
        """The bytes that one microbatch's forward keeps on each stage."""
        kept = (self.costs.memory or {}).get(Kind.F, (0.0,) * self.placement.num_stages)
        return listed(kept)

    @property
    def busiest(self) -> int:
        """The device with the most seconds per microbatch."""
        return self.work_seconds.index(max(self.work_seconds))

    @property
    def exchange_share(self) -> float:
        """The share of the work of all devices in which experts' tokens travel."""
        return sum(passes.total for passes in self.exchange_seconds) / self.placement.replicas / sum(self.work_seconds)

    def in_pairs(self) -> PlannedStep:
        """Return the step with costs that price pairs, in which the experts' tokens travel while the device computes."""
        forward, inputs = (
            tuple(getattr(passes, kind) for passes in self.exchange_seconds) for kind in ("forward", "input")
        )
        return replace(self, costs=replace(self.costs, forward_exchange=forward, backward_exchange=inputs))

    def held(self, kept: Sequence[float]) -> tuple[float, ...]:
        """Return the total bytes of every device, given ``kept``, the bytes of activations of each.

        Limits are compared with this sum.
        """
        rows = zip(kept, self.sent_share, self.static_bytes, self.buffer_bytes, self.optimizer_step_bytes, strict=True)
        return tuple(
            static + max(activations * (1 + sent) + buffers, in_optimizer_step)
            for activations, sent, static, buffers, in_optimizer_step in rows
        )

    def room(self, memory: float) -> tuple[float, ...]:
        """Return the bytes of each device's ``memory`` that are left for activations, up to rounding."""
        rows = zip(self.sent_share, self.static_bytes, self.buffer_bytes, strict=True)
        return tuple((memory - static - buffers) / (1 + sent) for sent, static, buffers in rows)

    @property
    def outside_seconds(self) -> float:
        """Seconds of a step outside the schedule: exposed reduction, and optimizer."""
        return self.reduction_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class _Cut:
    """The settings of a run that the costs of its stages depend on."""

    model: Model
    execution: Execution
    cluster: Cluster
    dp: int  # data-parallel ranks
    bytes: ParameterBytes
    slowdown: MeasuredSlowdown
    rolls_back: bool = False  # whether a step may be undone
    has_graphs: bool = False  # whether memory of activations stays with CUDA graphs between steps
    gradients: int = 1  # copies of the fp32 gradients: 2 if updates are delayed
    needed: tuple[bool, ...] = ()  # per layer, whether it is of the kind that every device needs
    shared_ends: bool = False  # whether every device holds an equal share of embedding and head

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters, except experts."""
        return self.dp * self.execution.cp

    def parts(self, places: Sequence[int] | None = None) -> list[Price]:
        """Return the predictions for each layer of the model and, in a GPT, for multi-token prediction as one layer.

        ``places`` are the places of the layers in their stages. Without them, layers count as if they stood after all that
        ``--recompute-method block`` recomputes, which is a lower bound.
        """
        model = self.model
        rows = list(zip(model.kinds, places or [model.layers] * model.layers, strict=True))
        distinct = {
            (kind, place): prices.layer(model, self.execution.at(place), self.cluster, kind, self.slowdown.layer)
            for kind, place in dict.fromkeys(rows)
        }
        return [*map(distinct.__getitem__, rows), self.ahead()][: model.pieces]

    def ahead(self) -> Price:
        """Return the prediction for all layers of multi-token prediction together.

        Their copy of the embedding is included, unless all devices share the embedding.
        """
        return prices.ahead(self.model, self.execution.of_prediction, self.cluster, self.slowdown, not self.shared_ends)

    def ends(self) -> tuple[Price, Price]:
        """Return the predictions for embedding and head, which are empty if all devices share them.

        A vision tower is added to the embedding. In a hybrid model, multi-token prediction is added to the head,
        because its pattern puts it on the last stage.
        """
        first, last = (Price(), Price()) if self.shared_ends else self.vocabulary()
        first += prices.tower_price(self.model, self.execution, self.cluster)
        return first, last + self.ahead() if self.model.pattern is not None else last

    def share(self, devices: int) -> list[Price]:
        """Return the predictions for one device's share of embedding and head; none if devices do not share them.

        Their messages belong to the schedule.
        """
        if not self.shared_ends:
            return []
        return [
            Price(
                seconds=(part.seconds + part.communication_seconds * -1) * (1 / devices),
                parameters=-(-part.parameters // devices),
                end_parameters=-(-part.end_parameters // devices),
            )
            for part in self.vocabulary()
        ]

    def vocabulary(self) -> tuple[Price, Price]:
        """Return the predictions for the embedding and for the head."""
        return (
            prices.embedding(self.model, self.execution, self.cluster),
            prices.head(self.model, self.execution, self.cluster, self.slowdown.head),
        )

    def everything(self) -> list[Price]:
        """Return the predictions for all parts of the model, with the embedding and the head."""
        return [*self.parts(), *replace(self, shared_ends=False).ends()]

    def static(self, part: Price) -> float:
        """Return the bytes of a part's parameters, their 8-bit copies, gradients and optimizer state on one rank.

        If a step may be rolled back, the state for that is included.
        """
        of, (trained, experts) = self.bytes, part.trained
        stored = part.parameters - (0 if of.keeps_weights else part.quantised(self.execution))
        weights = self.shared(stored, min(experts, stored)) if of.shards_weights else stored
        gradients = self.shared(trained, experts) if of.shards_gradients else trained
        ends = self.updated(part.end_parameters, 0) * (of.ends_optimizer - of.optimizer)
        nbytes = weights * of.weight + gradients * self.gradients * of.gradient + part.quantised_bytes
        return nbytes + (of.optimizer + of.rollback * self.rolls_back) * self.updated(trained, experts) + ends

    def updated(self, trained: int, experts: int) -> float:
        """Return the number of these trained parameters that one rank's optimizer updates.

        They are all or, with a sharded optimizer, the rank's share of them. ``experts`` of them belong to experts.
        """
        return self.shared(trained, experts, self.bytes.instances) if self.bytes.shards_optimizer else trained

    def shared(self, parameters: float, experts: float, instances: int = 1) -> float:
        """Return a rank's share of parameters that data-parallel ranks divide, of which ``experts`` are of experts.

        With several ``instances``, only as large a part of these ranks divides them.
        """
        replicas = max(1.0, self.replicas / instances)
        return (parameters - experts) / replicas + experts / max(1.0, self.execution.expert_replicas(replicas))


def price(
    run: Run,
    placement: Placement,
    layers: tuple[int, ...] | None = None,
    slowdown: MeasuredSlowdown | None = None,
    shared_ends: bool = False,
) -> PlannedStep:
    """Predict a run's step on a placement.

    ``layers`` has the pieces (layers, or multi-token prediction) of each stage of one replica, by default from the
    planner's partition. ``slowdown`` has the ratios of measured to predicted seconds. With ``shared_ends``, every device
    holds an equal share of embedding and head, and the costs leave out their seconds. Raise an UnsupportedError if the
    first stage lacks layers to which a vision tower adds.
    """
    cut = replace(_cut(run, slowdown), shared_ends=shared_ends)
    layers = layers or balanced(cut, placement)
    if layers[0] < run.model.least_first:
        raise UnsupportedError(
            "too-few-layers",
            f"the vision tower adds to the output of the model's first {run.model.least_first} layers, which must all "
            f"be on the first stage, and that stage has {layers[0]} layers; give it at least {run.model.least_first}, "
            "or use fewer stages",
        )
    return _step(cut, placement, layers)


def _cut(run: Run, slowdown: MeasuredSlowdown | None) -> _Cut:
    return _Cut(
        run.model,
        run.execution,
        run.cluster,
        run.parallelism.dp,
        bytes=parameter_bytes(run.precision, run.flags),
        slowdown=slowdown or MeasuredSlowdown(),
        rolls_back=run.rolls_back,
        has_graphs=run.has_graphs,
        gradients=2 if run.delays_updates else 1,
        needed=tuple(needed_layers(run.model.pattern or "", run.flags)),
    )


def least_seconds(run: Run, slowdown: MeasuredSlowdown | None = None) -> float:
    """Return a lower bound in seconds for every step of a run with this parallelism: all work, divided evenly."""
    cut = _cut(run, slowdown)
    work = sum(part.seconds.total - run.pairs * part.exchange_seconds.total for part in cut.everything())
    return run.parallelism.microbatches * work / run.parallelism.pp


def least_static(run: Run) -> float:
    """Return a lower bound, for any placement, of the fullest rank's bytes of parameters, gradients and optimizer."""
    cut = _cut(run, None)
    return sum(cut.static(part) for part in cut.everything()) / run.parallelism.pp


@lru_cache(maxsize=4096)
def balanced(cut: _Cut, placement: Placement) -> tuple[int, ...]:
    """Return the number of pieces of every stage that ``partition`` chooses. Multi-token prediction is one piece."""
    return shared_out(*_loads(cut, placement), placement)


def shared_out(
    loads: Loads, has_mtp_on_last: bool, placement: Placement, start: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the number of layers of every stage by ``partition``, with multi-token prediction as one layer.

    With ``start`` layers per stage, only the slowest rank gives layers away. With ``has_mtp_on_last``, multi-token
    prediction is on the stage of the head, and counts there.
    """
    from megatron_pipemem.model.partition import partition  # only here, because numpy takes long to load

    if start is not None:
        start = (*start[:-1], start[-1] - has_mtp_on_last)
    # All replicas have the same layers per stage, and each replica has a stage on every device.
    alone = placement if placement.replicas == 1 else Placement.linear(placement.num_devices)
    counts = partition(loads, alone, start)
    return (*counts[:-1], counts[-1] + has_mtp_on_last)


def loads_of(run: Run, placement: Placement, shared_ends: bool = False) -> tuple[Loads, bool]:
    """Return the loads to divide among stages, and whether multi-token prediction stays on the stage of the head.

    If it stays there, its load is part of ``last``. Otherwise it is a layer.
    """
    return _loads(replace(_cut(run, None), shared_ends=shared_ends), placement)


def pieces_of(run: Run) -> list[Passes]:
    """Return the seconds per microbatch of the part before the layers, of every layer, and of the part after them.

    Multi-token prediction counts as one more layer.
    """
    cut = _cut(run, None)
    first, last = cut.ends()
    return [part.seconds for part in (first, *cut.parts(), last)]


def _loads(cut: _Cut, placement: Placement) -> tuple[Loads, bool]:
    from megatron_pipemem.model.partition import Loads

    # Another layer of a stage costs as much as the last one of an equal share.
    parts = cut.parts([-(-cut.model.pieces // placement.model_stages) - 1] * cut.model.layers)
    first, last = cut.ends()
    # Multi-token prediction stays if all devices share the head, or if the placement is not round robin.
    has_mtp_on_last = len(parts) > cut.model.layers and (cut.shared_ends or not placement.is_round_robin)
    if has_mtp_on_last:
        last += parts.pop()
    loads = Loads(
        seconds=[part.seconds.total for part in parts],
        first_seconds=first.seconds.total,
        last_seconds=last.seconds.total,
        static_bytes=[cut.static(part) for part in parts],
        kept_bytes=[part.kept_bytes.saved for part in parts],
        first_bytes=cut.static(first) + first.kept_bytes.saved * placement.num_devices,
        last_bytes=cut.static(last) + last.kept_bytes.saved,
        needed=cut.needed,
        least_first=cut.model.least_first,
        tied=[part in cut.model.tied_layers for part in range(len(parts))],
    )
    return loads, has_mtp_on_last


@lru_cache(maxsize=1024)
def _step(cut: _Cut, placement: Placement, layers: tuple[int, ...]) -> PlannedStep:
    parts = cut.parts(places_of(layers, cut.model.layers))
    ends = list(accumulate(layers))
    stages = [parts[end - count : end] for end, count in zip(ends, layers, strict=True)]
    first, last = cut.ends()
    stages[0] = [first, *stages[0]]
    stages[-1] = [*stages[-1], last]
    stages *= placement.replicas
    keys = [tuple(map(id, stage)) for stage in stages]  # few stages differ
    distinct_stages = dict(zip(keys, stages, strict=True))

    def of_stages[T: Summed](value: Callable[[Price], T], zero: T) -> list[T]:
        sums = {key: sum(map(value, stage), zero) for key, stage in distinct_stages.items()}
        return [sums[key] for key in keys]

    seconds = of_stages(attrgetter("seconds"), Passes())
    kept = of_stages(attrgetter("kept_bytes"), KeptBytes())
    costs = Costs(
        forward=tuple(s.forward for s in seconds),
        backward_input=tuple(s.input for s in seconds),
        backward_weight=tuple(s.weight for s in seconds),
        p2p=_links(cut, placement),
        memory={
            Kind.F: tuple(s.saved for s in kept),
            Kind.I: tuple(s.after_input - s.saved for s in kept),
            Kind.W: tuple(-s.after_input for s in kept),
        },
    )
    share = cut.share(placement.num_devices)
    device_parts = [[*share, *(part for stage in owned for part in stages[stage])] for owned in placement.stages]
    replicas = placement.replicas
    # Layers of one kind and place share a price, so that few parts differ.
    distinct = {id(part): part for device in device_parts for part in device}
    static_of = {at: cut.static(part) for at, part in distinct.items()}
    updated_of = {at: cut.updated(*part.trained) for at, part in distinct.items()}
    updated = [sum(updated_of[id(part)] for part in device) for device in device_parts]
    in_optimizer_step = [cut.bytes.extra_in_optimizer_step * count for count in updated]
    static = [sum(static_of[id(part)] for part in device) for device in device_parts]
    if cut.has_graphs:
        static, in_optimizer_step = [*map(add, static, in_optimizer_step)], [0.0] * len(in_optimizer_step)
    return PlannedStep(
        placement=placement,
        layers=layers,
        offloaded_bytes=tuple(sum(part.offloaded_bytes for part in stage) for stage in stages),
        costs=costs,
        weight_bytes=tuple(cut.execution.element * sum(part.parameters for part in device) for device in device_parts),
        static_bytes=tuple(static),
        buffer_bytes=_buffers(cut, placement, layers),
        sent_share=_sent(
            message_bytes(cut.model, cut.execution), placement, [max(s.saved, s.after_input) for s in kept]
        ),
        communication_seconds=tuple(
            sum(part.communication_seconds.total for part in device) / replicas for device in device_parts
        ),
        exchange_seconds=tuple(of_stages(attrgetter("exchange_seconds"), Passes())),
        recompute_seconds=tuple(sum(part.recompute_seconds for part in device) / replicas for device in device_parts),
        work_seconds=tuple(sum(part.seconds.total for part in device) / replicas for device in device_parts),
        reduction_seconds=max(_exposed(cut, device, replicas) for device in device_parts)
        + max(_sums(cut, device, placement) for device in device_parts),
        optimizer_seconds=max(updated) * prices.adam_seconds(cut.cluster, cut.bytes),
        rollback_bytes=tuple(cut.bytes.rollback * cut.rolls_back * count for count in updated),
        optimizer_step_bytes=tuple(in_optimizer_step),
        host_optimizer_bytes=tuple(cut.bytes.host * count for count in updated),
    )


@lru_cache(maxsize=256)
def _links(cut: _Cut, placement: Placement) -> Mapping[tuple[int, int], float]:
    execution, cluster = cut.execution, cut.cluster
    nbytes = message_bytes(cut.model, execution)
    apart = execution.tp * execution.cp * cut.dp

    def seconds(source: int, destination: int) -> float:
        nodes = {device * apart // cluster.devices_per_node for device in (source, destination)}
        link = cluster.intra_node if len(nodes) == 1 else cluster.inter_node
        return link.seconds(nbytes) * cut.slowdown.messages

    links: dict[tuple[int, int], float] = {}
    for a, b in pairwise(placement.devices):
        links |= {(a, b): seconds(a, b), (b, a): seconds(b, a)}
    return links


def _buffers(cut: _Cut, placement: Placement, layers: tuple[int, ...]) -> tuple[float, ...]:
    execution, whole = cut.execution, _whole_layer(cut)
    unit = execution.recompute_num_layers if execution.recompute_method == "uniform" else 1

    def recomputed(owned: Sequence[int]) -> float:
        return whole * max(min(unit, layers[stage % placement.model_stages]) for stage in owned)

    message = message_bytes(cut.model, execution)
    per_stage = _OTHER_MESSAGES * message * (placement.num_devices > 1)
    of_graphs = _MESSAGES_OF_GRAPHS * message * cut.has_graphs
    of_nccl = _nccl_bytes(placement) if cut.cluster.backend == "nccl" else (0,) * placement.num_devices
    logits = prices.logit_bytes(cut.model, execution)
    return tuple(
        per_stage * len(owned)
        + of_graphs
        + of_nccl[device]
        + recomputed(owned)
        + logits * (not cut.shared_ends and any(placement.next_stage(stage) is None for stage in owned))
        for device, owned in enumerate(placement.stages)
    )


@lru_cache(maxsize=256)
def _whole_layer(cut: _Cut) -> float:
    """Return the bytes that a backward recomputes of the largest layer; 0 without full recomputation."""
    if cut.execution.recompute != "full":
        return 0.0
    plain = replace(cut.execution, recompute="none")
    return max(layer_bytes(cut.model, plain, kind).saved for kind in dict.fromkeys(cut.model.all_kinds))


@lru_cache(maxsize=256)
def _nccl_bytes(placement: Placement) -> tuple[int, ...]:
    return tuple(nccl_bytes(placement, device) for device in range(placement.num_devices))


def _sent(message: float, placement: Placement, most: Sequence[float]) -> tuple[float, ...]:
    """Return the bytes of sent outputs for each byte of activations of a device.

    ``most`` has the most bytes that a microbatch keeps on each stage. With full recomputation these are those of its
    backward, and the sent outputs of other microbatches are left out.
    """
    sending = _sending_stages(placement)
    return tuple(
        message * len(sending & set(owned)) / whole if (whole := sum(most[stage] for stage in owned)) else 0.0
        for owned in placement.stages
    )


@lru_cache(maxsize=256)
def _sending_stages(placement: Placement) -> frozenset[int]:
    """Return the stages whose output is sent to another device."""
    return frozenset(stage for kind, stage in Router(placement).emitting if kind is Kind.F)


def _sums(cut: _Cut, device: list[Price], placement: Placement) -> float:
    """Return the seconds in which one rank sums its stages' gradients with those of their replicas on other ranks.

    ``device`` has the prices of all parts of the model on this rank. With one replica, the result is 0.
    """
    if placement.replicas == 1:
        return 0.0
    nbytes = sum(part.trained[0] for part in device) * cut.bytes.gradient
    link = cut.cluster.link(placement.num_devices, cut.execution.tp * cut.execution.cp * cut.dp)
    return prices.all_reduce(nbytes, placement.replicas, link)


def _exposed(cut: _Cut, device: list[Price], replicas: int) -> float:
    """Return the seconds of one rank's data-parallel messages in a step that no computing hides.

    ``device`` has the prices of all parts of the model on this rank. ``replicas`` is the number of replicas of the
    model in the pipeline. If there are several, no backward hides the reduction. The result is 0 for one data-parallel
    rank.
    """
    if cut.replicas == 1:
        return 0.0
    experts = sum(part.trained[1] for part in device)
    others = sum(part.trained[0] for part in device) - experts
    of_experts = max(1, int(cut.execution.expert_replicas(cut.replicas)))
    link = cut.cluster.link(cut.replicas, cut.execution.tp)
    apart = cut.cluster.link(of_experts, cut.execution.expert_tp * cut.execution.ep)

    def messages(nbytes: float) -> float:
        return prices.gather(others * nbytes, cut.replicas, link) + prices.gather(experts * nbytes, of_experts, apart)

    forward = sum(part.seconds.forward for part in device)
    backward = sum(part.seconds.input + part.seconds.weight for part in device) if replicas == 1 else 0.0
    gradients = messages(cut.bytes.gradient)
    if not cut.bytes.shards_optimizer:
        return max(0.0, 2 * gradients - backward)
    return max(0.0, gradients - backward) + max(0.0, messages(cut.execution.element) - forward)


def mfu(run: Run, seconds: float) -> float:
    """Return the model FLOPs utilisation of a step of ``seconds`` seconds, as a fraction of the devices' peak."""
    flops = model_flops(run.model) * run.parallelism.global_batch
    return flops / (seconds * run.parallelism.ranks * run.cluster.tflops * 1e12)


def ends_seconds(run: Run, slowdown: MeasuredSlowdown | None = None) -> tuple[float, float]:
    """Return the seconds per microbatch of the embedding and of the head, forward and backward, without messages.

    Each is computed as a whole by one rank.
    """
    embedding, head = (
        part.seconds.total - part.communication_seconds.total for part in _cut(run, slowdown).vocabulary()
    )
    return embedding, head
