"""List what a run can do beside computing in another order: offload, vocabulary parallelism, and what others register.

A variant changes what the stages cost, or adds actions to an order, or both, and says what the run's configuration then is.

* Activations may wait on the host (arXiv 2503.01328). The transfers are planned within the memory of each device and of its
  host, the longest-lived activations first.
* Embedding and head may be cut over all pipeline ranks (arXiv 2411.05288). Every rank then holds an equal share of both, with
  its passes and collectives between the others. Collectives go over the slowest link of the pipeline; that they slow the
  layers' kernels down is not priced (7 to 8 % of F and B in the paper's profile).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.config.runs import Run, ScheduleChoice
from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.planner.activations import message_bytes
from megatron_pipemem.planner.prices import MeasuredSlowdown, gather, logit_bytes
from megatron_pipemem.planner.slices import sliced_step, why_not_sliced
from megatron_pipemem.planner.step import PlannedStep, ends_seconds, price
from megatron_pipemem.request import DEFAULT_HOST_SHARE, Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel
from megatron_pipemem.schedule.memory_cap import MemoryCap, parse_cap
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM, VocabularyCosts


@dataclass(frozen=True)
class Variant:
    """One way."""

    name: str  # what ``--only variant=NAME`` and tables call it
    choice: Callable[[ScheduleChoice], ScheduleChoice]
    """The schedule's part of a run's configuration, from that without the variant."""
    prepare: Callable[[Run, Placement, MeasuredSlowdown | None], PlannedStep]
    """The step with other costs and bytes, from placement and pace. Its costs must be a lower bound for what ``apply``
    makes of an order, so that the planner may leave out what is slower even so."""
    apply: Callable[[Schedule, PlannedStep, tuple[float, ...]], Schedule]
    """The order with further actions, within so many bytes per device. May raise PipememError where it cannot be had."""
    frees_memory: bool = False
    """It is for orders that hold too much, and no use to others. Without it, it holds no less than the order alone. Either
    way it takes no less time than that."""


PLAIN = "plain"
"""The name of a run without any variant."""
_VARIANTS: dict[str, Variant] = {}


def register_variant(variant: Variant) -> Variant:
    """Add a variant to what the planner enumerates."""
    if variant.name in _VARIANTS or variant.name == PLAIN:
        raise UnsupportedError("exists-already", f"variant {variant.name!r} is registered already; pick another name")
    _VARIANTS[variant.name] = variant
    return variant


def variants() -> tuple[Variant, ...]:
    """Return all variants but the plain one: those of this package, and what others registered."""
    return tuple(_VARIANTS.values())


HOST_MEMORY = "pipemem-host-memory"
"""The flag that says how much of a node's memory its ranks may use; a share of it otherwise."""


def offload_step(
    run: Run, placement: Placement, pace: MeasuredSlowdown | None = None, layers: tuple[int, ...] | None = None
) -> PlannedStep:
    """Price a step with the channel to the host, what goes over it, and how much of it the host can hold."""
    step = price(run, placement, layers, pace)
    host, moved = run.cluster.host, step.moved
    ways = (host.d2h_gb_per_s, host.h2d_gb_per_s)
    there, back = (tuple(nbytes / (speed * host.duplex * 1e9) for nbytes in moved) for speed in ways)
    # Devices that share a switch take turns, so that one sends while another receives.
    channel = Channel(there, back, duplex=run.cluster.sharing(0) == 1)
    away = {Kind.WAIT_OFFLOAD: tuple(-nbytes for nbytes in moved), Kind.RELOAD: moved}
    costs = replace(step.costs, channel=channel, memory={**(step.costs.memory or {}), **away})
    return replace(step, costs=costs, host=host_bytes(run))


def host_bytes(run: Run) -> float:
    """Return the bytes of host memory that one rank may take."""
    given = run.flags.get(HOST_MEMORY)
    if given is None:
        return DEFAULT_HOST_SHARE * run.cluster.host_bytes
    return parse_cap(str(given)).amounts[0] / run.cluster.devices_per_node


def offloaded(schedule: Schedule, step: PlannedStep, room: tuple[float, ...]) -> Schedule:
    """Return the schedule with transfers to the host and back, so that it fits. Raise an UnsupportedError if too much has
    to stay. ``room``: bytes that the activations of every device may take.
    """
    request = Request.for_order(schedule, MemoryCap(room, True))
    shape = Shape(schedule.num_devices, None, schedule.num_microbatches)
    try:
        return choose(request, shape, Knowledge(step.costs, host_budget=step.host)).schedule
    except MemoryCapError as error:
        why = ", ".join(error.obstacles) or "what runs at the time"
        raise UnsupportedError("cap-unreachable", f"too much has to stay on a device ({why})") from error


_STATISTICS = 3 * 4  # bytes per token: maximum, sum and label's logit


def vocabulary_step(
    barriers: int,
    run: Run,
    placement: Placement,
    pace: MeasuredSlowdown | None = None,
    layers: tuple[int, ...] | None = None,
) -> PlannedStep:
    """Price a step with embedding and head cut over all devices, and what their passes take and keep. Slices have equal
    parts of that, and prices of their own of the layers.
    """
    sliced = (run.schedule.slices or 1) > 1 and why_not_sliced(run) is None
    step = (sliced_step if sliced else price)(run, placement, layers, pace, shared_ends=True)
    p, execution = placement.num_devices, run.execution
    cut = run.parallelism
    link = run.cluster.link(p, cut.tp * cut.cp * cut.dp)
    # Predictions of all depths are one head's work, on as many times the tokens.
    depths, once = run.model.heads_of_output, message_bytes(run.model, execution)
    hidden, n = depths * once, depths * execution.tokens(run.model)
    # A ring passes on what it gets while more arrives. Further predictions need the same embeddings on the last stage.
    apart = depths > 1 and placement.devices[0] != placement.devices[placement.model_stages - 1]
    whole, lookup = link.seconds(hidden), link.seconds(once) * (2 if apart else 1)
    collectives = {
        Kind.REDUCE_E: lookup,
        Kind.BCAST_X: whole,
        Kind.REDUCE_X: whole,
        Kind.BCAST_E: lookup,
        Kind.STATS: gather(n * _STATISTICS * p, p, link),
        Kind.BCAST_G: gather(n * 4, p, link),
    }
    embedding, head = ends_seconds(run, pace)
    costs = VocabularyCosts.of_head(head, p, barriers, embedding=embedding, collectives=collectives)
    # A shard's logits and the head's input from S to T; with one barrier the two halves of the input's gradient too.
    held = depths * logit_bytes(run.model, execution) / p + hidden * (1 + 2 * (barriers == 1))
    memory = {**(step.costs.memory or {}), Kind.S: (held,) * p, Kind.T: (-held,) * p}
    return replace(step, costs=replace(step.costs, vocabulary=costs, memory=memory))


register_variant(
    Variant(
        "offload",
        choice=lambda choice: replace(choice, offload="auto"),
        prepare=offload_step,
        apply=offloaded,
        frees_memory=True,
    )
)


def _cut_vocabulary(barriers: int, schedule: Schedule, step: PlannedStep, room: tuple[float, ...]) -> Schedule:
    return with_vocabulary(schedule, barriers, step.costs)


for _algorithm, _barriers in BARRIERS_OF_ALGORITHM.items():
    register_variant(
        Variant(
            f"vocabulary-{_algorithm}",
            choice=partial(replace, vocab_parallel=str(_algorithm)),
            prepare=partial(vocabulary_step, _barriers),
            apply=partial(_cut_vocabulary, _barriers),
        )
    )
