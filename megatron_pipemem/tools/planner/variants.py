"""Variants of a run besides its order of passes: offload, vocabulary parallelism, and registered ones.

A variant changes the costs of stages, adds actions to an order, or both. It also changes the run's configuration.

* Offload (arXiv 2503.01328): activations wait on the host. Copies are planned within the memory of each device and
  host, the longest-lived activations first.
* Vocabulary parallelism (arXiv 2411.05288): embedding and head are cut over all pipeline ranks. Every rank holds an
  equal share of both, with its passes and collectives between those of layers. Collectives run on a ring through the
  pipeline's ranks (``Cluster.ring``), and slow the kernels that run beside them (``BESIDE_COLLECTIVES``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.features.pairs.orders import Pairings, fastest, with_pairs
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.model.activations import message_bytes
from megatron_pipemem.request import DEFAULT_HOST_SHARE, Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.memory_cap import MemoryCap, parse_cap
from megatron_pipemem.schedule.options import AUTO, OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM, VocabularyCosts
from megatron_pipemem.tools.config.runs import Run, ScheduleChoice
from megatron_pipemem.tools.planner.early_wgrad import moves_weights
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown, gather, logit_bytes
from megatron_pipemem.tools.planner.repetition import Repetition
from megatron_pipemem.tools.planner.replay import Order, OrderPrice, Replay, family_schedule, repeating, replay_key
from megatron_pipemem.tools.planner.slices import step_of
from megatron_pipemem.tools.planner.step import PlannedStep, ends_seconds, price


@dataclass(frozen=True)
class Variant:
    """A change of a run that the planner tries with every order, such as offload."""

    name: str  # for ``--only variant=NAME`` and tables
    choice: Callable[[ScheduleChoice], ScheduleChoice]
    """Returns the schedule's part of a run's configuration, given that part without the variant. ``run_step`` prices it, and
    these costs must be a lower bound for orders from ``apply``, so that the planner may leave out slower ones."""
    apply: Callable[[Schedule, PlannedStep, tuple[float, ...]], Schedule]
    """Returns the order with further actions, within the given bytes per device, or raises a PipememError."""
    frees_memory: bool = False
    """Whether the variant is only for orders that exceed the memory. Otherwise it holds at least as much as the order alone.
    In both cases it takes at least as long, unless it hides exchanges."""
    cuts_vocabulary: bool = False  # which a model with a vision tower does not allow


PLAIN, OFFLOAD = "plain", "offload"
"""The names of a run without a variant, and of the variant that copies activations to the host."""
_VARIANTS: dict[str, Variant] = {}


def register_variant(variant: Variant) -> Variant:
    """Add a variant to those that the planner tries, and return it; raise an UnsupportedError if its name is taken."""
    if variant.name in _VARIANTS or variant.name == PLAIN:
        raise UnsupportedError(
            "exists-already", f"variant {shortened(variant.name)} is registered already; pick another name"
        )
    _VARIANTS[variant.name] = variant
    return variant


def variants() -> tuple[Variant, ...]:
    """Return all registered variants. ``plain``, which changes nothing, is not among them."""
    return tuple(_VARIANTS.values())


HOST_MEMORY = "pipemem-host-memory"
"""The flag for the host memory of a node that its ranks may use for activations; by default a share of all."""


def run_step(
    run: Run,
    placement: Placement,
    layers: tuple[int, ...] | None = None,
    slowdown: MeasuredSlowdown | None = None,
) -> PlannedStep:
    """Predict a run's step, with all that its schedule adds: slices, pairs, a cut vocabulary, or offload.

    ``layers`` has the pieces of every stage, by default from the planner's partition.
    """
    choice = run.schedule
    if choice.vocab_cut not in (OFF, AUTO):
        return _vocabulary_step(BARRIERS_OF_ALGORITHM[int(choice.vocab_cut)], run, placement, layers, slowdown)
    if choice.offload != OFF:  # copies are planned for whole microbatches
        return _with_offload(run, price(run, placement, layers, slowdown))
    step = step_of(run, placement, layers, slowdown)
    return step.in_pairs() if run.pairs else step


def variant_of(run: Run) -> str:
    """Return the name of what a run's schedule adds to an order."""
    if run.schedule.vocab_cut not in (OFF, AUTO):
        return f"vocabulary-{run.schedule.vocab_cut}"
    return OFFLOAD if run.schedule.offload != OFF else IN_PAIRS.name if run.pairs else PLAIN


def _with_offload(run: Run, step: PlannedStep) -> PlannedStep:
    """Return the step with the link to the host, the bytes of copies, and the memory of the host."""
    host, moved = run.cluster.host, step.offloaded_bytes
    ways = (host.d2h_gb_per_s, host.h2d_gb_per_s)
    there, back = (tuple(nbytes / (speed * host.duplex * 1e9) for nbytes in moved) for speed in ways)
    # Devices that share a switch take turns: one sends while another receives.
    channel = Channel(there, back, duplex=run.cluster.sharing(0) == 1)
    away = {Kind.WAIT_OFFLOAD: tuple(-nbytes for nbytes in moved), Kind.RELOAD: moved}
    costs = replace(step.costs, channel=channel, memory={**(step.costs.memory or {}), **away})
    return replace(step, costs=costs, host_bytes=host_bytes(run))


def host_bytes(run: Run) -> float:
    """Return the bytes of host memory that one rank may use for activations.

    The ranks of a node divide the memory that the flag ``HOST_MEMORY`` gives. Without it, each rank
    may use a fixed share of its part of the host's memory.
    """
    limit = run.flags.get(HOST_MEMORY)
    if limit is None:
        return DEFAULT_HOST_SHARE * run.cluster.host_bytes
    return parse_cap(str(limit)).amounts[0] / run.cluster.devices_per_node


def offloaded(schedule: Schedule, step: PlannedStep, room: tuple[float, ...]) -> Schedule:
    """Return the schedule with enough copies to the host and back to fit into ``room`` bytes per device.

    ``room`` is the memory that is left for activations. Raise an UnsupportedError if no copies make a device's
    activations fit into it.
    """
    request = Request.for_order(schedule, MemoryCap(room, True))
    shape = Shape(schedule.num_devices, None, schedule.num_microbatches)
    try:
        return choose(request, shape, Knowledge(step.costs, host_budget=step.host_bytes)).schedule
    except MemoryCapError as error:
        why = ", ".join(error.obstacles) or "activations in use"
        raise UnsupportedError(
            "cap-unreachable",
            "activations exceed a device's memory even with copies to the host, because some stay on the device "
            f"({why}); take more ranks, smaller microbatches or recomputation",
        ) from error


def paired_timeline(schedule: Schedule, step: PlannedStep, room: tuple[float, ...]) -> Timeline:
    """Return the simulated step of the schedule with the pairs that make it shortest within ``room``.

    ``room`` has the bytes of each device that are left for all activations. The step has no pairs if none makes it
    shorter.
    """

    def fits(candidate: Schedule) -> bool:
        return all(peak <= limit for peak, limit in zip(peaks(candidate, step.costs), room, strict=True))

    return with_pairs(schedule, step.costs, fits)


def paired_price(
    published: Callable[[int], Replay], step: PlannedStep, room: tuple[float, ...], num_microbatches: int
) -> OrderPrice:
    """Return the time and peaks of a step of any length with the pairs that ``paired_timeline`` chooses.

    ``published`` returns the replay of a step without pairs with a given number of microbatches.
    """
    schedule, repetition = repeating(published, step.placement.num_devices, num_microbatches)
    alone, *versions = _versions(schedule, num_microbatches, _PairCosts(step.costs), repetition)
    fitting = [
        version
        for version in versions
        if all(peak <= limit for peak, limit in zip(version.peak_bytes, room, strict=True))
    ]
    return fastest((alone, *fitting), lambda price: price.seconds)


class _PairCosts:
    """Costs as the key of a cache: equal for schedules of passes, with pairs or without."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._key = replay_key(costs), costs.forward_exchange, costs.backward_exchange

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PairCosts) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=64)
def _versions(
    schedule: Schedule, num_microbatches: int, key: _PairCosts, repetition: Repetition | None
) -> tuple[OrderPrice, ...]:
    """Return the time and peaks of a step without pairs, and of its versions with pairs."""
    costs = key.costs
    blocks = None if repetition is None else repetition.blocks(num_microbatches)
    seconds = simulate(schedule, costs).makespan if repetition is None else repetition.makespan(costs, num_microbatches)
    runs = Pairings(schedule, costs, blocks).runs()
    return (
        OrderPrice(seconds, peaks(schedule, costs)),
        *(OrderPrice(run.seconds, peaks(run.schedule, costs), run.hidden) for run in runs),
    )


IN_PAIRS = Variant(
    "pairs",
    choice=lambda choice: choice,
    apply=lambda schedule, step, room: paired_timeline(schedule, step, room).schedule,
)
"""Forwards and backwards in pairs, for runs with ``--overlap-moe-expert-parallel-comm`` only."""


def build_order(
    run: Run, order: Order, step: PlannedStep, room: tuple[float, ...], variant: Variant | None, count: int
) -> Schedule:
    """Return the schedule of a step with ``count`` microbatches under a family, with the actions of the variant.

    ``room`` has the bytes of every device that are left for activations (``PlannedStep.room``). W may run earlier
    (``schedule.earlier_weights``), but not if the variant frees memory or cuts the head over the ranks.
    """
    is_plain = variant in (None, IN_PAIRS)
    fits_costs = is_plain and run.units.are_whole and "costs" in family(order.name).options
    costs = step.costs if fits_costs else None
    schedule = family_schedule(order.name, run.parallelism.pp, count, order.chunks, costs, run.units.parts)
    if is_plain and moves_weights(run):
        schedule = with_earlier_weights(schedule, step.costs)
    return schedule if variant is None else variant.apply(schedule, step, room)


_STATISTICS = 3 * 4  # bytes per token: maximum, sum and label's logit
BESIDE_COLLECTIVES = 1.064
"""Seconds of F, I, W, S and T with a cut vocabulary over those without collectives beside them.

It is the mean of the ten cases that the artifact of arXiv 2411.05288 profiled on 8 A100. A collective holds some of a
device's multiprocessors while it runs, and while it waits for other ranks."""


def _vocabulary_step(
    barriers: int,
    run: Run,
    placement: Placement,
    layers: tuple[int, ...] | None,
    slowdown: MeasuredSlowdown | None,
) -> PlannedStep:
    """Predict a step with embedding and head cut over all devices, including the seconds and bytes of their passes.

    ``barriers`` is the number of barriers per microbatch. If microbatches are cut into slices, each slice has an equal
    part of these passes, and its own costs of layers. Raise an UnsupportedError for a model with a vision tower.
    """
    if run.model.tower is not None:
        raise UnsupportedError(
            "vocabulary-model",
            "the embedding and head of a model with a vision tower cannot be cut over the pipeline; pass "
            "--pipemem-vocab-cut off",
        )
    own = slowdown or MeasuredSlowdown()
    slowed = replace(own, layer=own.layer * BESIDE_COLLECTIVES)
    step = step_of(run, placement, layers, slowed, shared_ends=True)
    p, execution = placement.num_devices, run.execution
    cut = run.parallelism
    link = run.cluster.ring(p, cut.tp * cut.cp * cut.dp)
    # With multi-token prediction, one head computes all predictions, so that its tokens are multiplied.
    depths, once = run.model.heads_of_output, message_bytes(run.model, execution)
    hidden, n = depths * once, depths * execution.tokens(run.model)
    # A ring forwards data while more arrives. Multi-token prediction needs the same embeddings on the last stage.
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
    embedding, head = ends_seconds(run, slowdown)
    costs = VocabularyCosts.of_head(
        head, p, barriers, embedding=embedding, scaling=1 / BESIDE_COLLECTIVES, collectives=collectives
    )
    # Held from S to T: a shard's logits and the head's input; with one barrier also both halves of the input's gradient.
    head_bytes = depths * logit_bytes(run.model, execution) / p + hidden * (1 + 2 * (barriers == 1))
    memory = {**(step.costs.memory or {}), Kind.S: (head_bytes,) * p, Kind.T: (-head_bytes,) * p}
    return replace(step, costs=replace(step.costs, vocabulary=costs, memory=memory))


register_variant(
    Variant(
        OFFLOAD,
        choice=lambda choice: replace(choice, offload="auto"),
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
            choice=partial(replace, vocab_cut=str(_algorithm)),
            cuts_vocabulary=True,
            apply=partial(_cut_vocabulary, _barriers),
        )
    )
