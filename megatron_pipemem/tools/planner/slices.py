"""Predict a run whose microbatches are cut along their sequences into slices (arXiv 2406.03488, 2504.14519).

A slice is priced as a microbatch with a shorter sequence. Its matrix products lose as much to partly filled waves of
GPU blocks, and its messages have the same latency. Only attention differs:

* causal attention of a slice sees the slices before it. A slice from ``x0`` to ``x1``, as shares of the sequence, takes
  ``x1^2 - x0^2`` of the time of the whole sequence. Of ``n`` equal slices, the last one takes ``2 n - 1`` times as long
  as the first;
* F of a microbatch's first slice allocates all its keys and values, ``2 groups head_dim s b e / tp`` bytes per layer. I
  of its last slice, the first to run backward, allocates all their gradients. I of the first slice frees both. With
  context parallelism every rank has those of the whole sequence, and gathers them slice by slice.

The other tensors that F keeps scale with tokens. Buffers are those of a slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.prices import slice_tokens
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.model import counts
from megatron_pipemem.model.model import Execution, Model, Sublayer
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.refusals import GATHERED_KEYS, KEYS_FLAG, flag_values
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.options import TOKENS, SliceCut
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.config.runs import Parallelism, Run
from megatron_pipemem.tools.planner import prices
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.step import PlannedStep, price

SLICES, SHORTEST_SLICE, MICROBATCHES = (2, 4, 8), 4096, 4
"""Numbers of slices that are proposed, the fewest tokens of a proposed slice, and the number of microbatches per pipeline
rank from which the bubble is too small for slices.
"""
LEAST_SLICED_GAIN = 0.03
"""How much shorter a step must be with slices than the best step without, so that slices are proposed."""


@dataclass(frozen=True)
class Attention:
    """The seconds and bytes of attention, in a layer or a stage, that are not proportional to the tokens of a slice.

    They are for one microbatch. Its slices get unequal parts of the seconds. The first slice allocates all the bytes.
    """

    seconds: Passes = Passes()  # for the whole sequence, the part of F and I that grows with its square
    keys: float = 0.0  # bytes of keys and values of this rank's tokens

    def __add__(self, other: Attention) -> Attention:
        return Attention(self.seconds + other.seconds, self.keys + other.keys)


def proposed_slices(run: Run) -> tuple[tuple[int, ...], str | None]:
    """Return the numbers of slices that may shorten the steps of a run, and the reason if the run can have none of them.

    Slices may shorten steps with few microbatches, of one long sequence each. Otherwise there is neither a number nor a
    reason.
    """
    cut = run.parallelism
    # Transformer Engine copies keys and values of several sequences for each slice, which is not priced.
    if cut.pp == 1 or cut.micro_batch > 1 or cut.microbatches >= MICROBATCHES * cut.pp:
        return (), None
    reasons = {
        count: why_not_sliced(with_slices(run, count))
        for count in SLICES
        if run.model.sequence >= count * cut.cp * SHORTEST_SLICE
    }
    counts = tuple(count for count, reason in reasons.items() if reason is None)
    return counts, None if counts else next(iter(reasons.values()), None)


def doubt_of(runs: Iterable[Run]) -> str | None:
    """Return a sentence if one of the runs has slices that are shorter than those whose kernels were timed."""
    counts_of_runs = [(run, run.units.parts) for run in runs]
    lengths = [min(part_tokens(run, count)) // run.parallelism.cp for run, count in counts_of_runs if count > 1]
    if not lengths or min(lengths) >= SHORTEST_SLICE:
        return None
    return (
        f"kernels were timed from {SHORTEST_SLICE:,} tokens on, so slices of {min(lengths):,} tokens a rank may be slower than "
        "their price"
    )


def with_slices(run: Run, slices: int, cut: SliceCut = TOKENS) -> Run:
    """Return a run with that many slices, whose schedule is chosen later."""
    sliced = run.with_parts(slices)
    return replace(sliced, schedule=replace(sliced.schedule, slice_cut=cut))


def why_not_sliced(run: Run) -> str | None:
    """Return the reason why a run cannot be cut into its slices, or not be priced with them; ``None`` if it can."""
    model, cut, slices = run.model, run.parallelism, run.units.parts
    if run.schedule.overlap_steps:
        return "slices need a barrier between steps, and the run has overlap_steps"
    if cut.pp == 1:
        return "slices need several pipeline ranks"
    if model.tower is not None:
        return "slices need a model without a vision tower, because a tower needs whole sequences"
    if model.mtp_layers or any(
        set(kind) - {Sublayer.ATTENTION, Sublayer.FFN, Sublayer.EXPERTS} for kind in model.kinds
    ):
        return "slices are priced for plain attention alone, without latents, states and multi-token prediction"
    if run.schedule.slice_cut == TOKENS and model.sequence % (2 * slices * _multiple(cut)):
        return f"{slices} equal slices of a sequence would not have an even number of tokens on every rank"
    try:
        fuses = run.execution.fused_rotations and model.position == "rope"
        settings: dict[str, object] = {"attention-dropout": model.dropout, "apply-rope-fusion": fuses}
        settings |= {"context-parallel-size": cut.cp, KEYS_FLAG: GATHERED_KEYS}
        check_gates(GateQuestion(Request("seq1f1b"), flag_values(settings | run.flags)))
        part_tokens(run, slices)
    except UnsupportedError as error:
        return f"{error}"
    return None


def part_tokens(run: Run, parts: int) -> tuple[int, ...]:
    """Return the number of tokens of each part of a run's sequences; raise an UnsupportedError if they are too short."""
    share, multiple = counts.attention_share(run.model), _multiple(run.parallelism)
    return slice_tokens(run.model.sequence, parts, run.schedule.slice_cut, share, multiple=multiple)


def _multiple(cut: Parallelism) -> int:
    """Return the number of which the tokens of a slice are a multiple. Each context-parallel rank has two equal parts."""
    return cut.cp * math.lcm(cut.tp if cut.sequence_parallel else 1, 2 if cut.cp > 1 else 1)


def attention(model: Model, execution: Execution, run: Run, kind: str, slowdown: Passes) -> Attention:
    """Return the seconds and bytes of attention in one layer for one microbatch.

    The seconds are the part of F and I that grows with the square of the sequence length. The bytes are those of keys
    and values. ``slowdown`` has the measured over the predicted seconds of each pass.
    """
    whole = counts.layer_flops(model, execution, kind)
    half = counts.layer_flops(replace(model, sequence=model.sequence // 2), execution, kind)
    # FLOPs are the sum of a linear and a quadratic term in the sequence length. This is the quadratic one.
    square = (whole + half * -2) * 2
    seconds = prices.each_pass(lambda flops, slower: flops * slower / run.cluster.flops, square, slowdown)
    keys = 2 * execution.tokens(model) * execution.key_groups(model) * model.channels * execution.element
    return Attention(seconds, keys * kind.count(Sublayer.ATTENTION))


def sliced_step(
    run: Run,
    placement: Placement,
    layers: tuple[int, ...] | None = None,
    slowdown: MeasuredSlowdown | None = None,
    shared_ends: bool = False,
) -> PlannedStep:
    """Predict a step whose microbatches are cut into the run's slices. The arguments are those of ``price``.

    The costs have one value per stage and slice. The values of a stage's slices are consecutive.
    """
    whole, model = price(run, placement, layers, slowdown, shared_ends), run.model
    tokens = part_tokens(run, run.units.parts)
    short = {
        length: price(
            replace(run, model=replace(model, sequence=length)), placement, whole.layers, slowdown, shared_ends
        )
        for length in dict.fromkeys(tokens)
    }
    slices = [
        _Slice(short[length], end - length, end, model.sequence)
        for length, end in zip(tokens, accumulate(tokens), strict=True)
    ]
    slower = (slowdown or MeasuredSlowdown()).layer
    per_layer = {kind: attention(model, run.execution, run, kind, slower) for kind in dict.fromkeys(model.kinds)}
    ends = list(accumulate(whole.layers))
    shared = [
        sum((per_layer[kind] for kind in model.kinds[end - count : end]), Attention())
        for end, count in zip(ends, whole.layers, strict=True)
    ]
    forward = _seconds(slices, Kind.F, [s.seconds.forward for s in shared])
    inputs = _seconds(slices, Kind.I, [s.seconds.input for s in shared])
    weights = _seconds(slices, Kind.W, [s.seconds.weight for s in shared])
    memory = _memory(slices, [s.keys for s in shared], run.execution)
    n = len(slices)
    work = tuple(
        sum(sum(table[stage * n : stage * n + n]) for table in (forward, inputs, weights) for stage in owned)
        for owned in placement.stages
    )
    return replace(
        whole,
        costs=replace(
            slices[0].step.costs,
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            p2p=_links(slices),
            memory=memory,
        ),
        buffer_bytes=_per_device(max, [slice_.step.buffer_bytes for slice_ in slices]),
        communication_seconds=_per_device(sum, [slice_.step.communication_seconds for slice_ in slices]),
        recompute_seconds=_recompute(run, placement, slices, shared),
        work_seconds=work,
    )


def step_of(
    run: Run,
    placement: Placement,
    layers: tuple[int, ...] | None = None,
    slowdown: MeasuredSlowdown | None = None,
    shared_ends: bool = False,
) -> PlannedStep:
    """Predict a run's step, with a price per slice if the run has slices that can be priced."""
    is_cut = not run.units.are_whole and why_not_sliced(run) is None
    return (sliced_step if is_cut else price)(run, placement, layers, slowdown, shared_ends)


@dataclass(frozen=True)
class _Slice:
    """A slice, its position in the sequence, and the predicted step of sequences with its length."""

    step: PlannedStep  # of sequences with its length
    begin: int  # its first token
    end: int  # the first token after it
    sequence: int  # tokens of the sequence

    @property
    def share(self) -> float:
        """The slice's tokens as a fraction of the sequence's."""
        return (self.end - self.begin) / self.sequence

    @property
    def earlier(self) -> float:
        """The time of the slice's attention to earlier slices, as a fraction of the whole sequence's attention."""
        return (self.end**2 - self.begin**2) / self.sequence**2 - self.share**2


def _per_device(combine: Callable[[Iterable], float], tables: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(combine, zip(*tables, strict=True)))


def _seconds(slices: Sequence[_Slice], kind: Kind, square: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of one kind of pass, per stage and slice.

    They are those of a sequence as long as the slice, plus those of attention to earlier slices. ``square`` has the
    seconds of attention of the whole sequence on each stage.
    """
    tables = [slice_.step.costs.seconds(slice_.step.placement)[kind] for slice_ in slices]
    return tuple(
        table[stage] + of_whole * slice_.earlier
        for stage, of_whole in enumerate(square)
        for table, slice_ in zip(tables, slices, strict=True)
    )


def _recompute(
    run: Run, placement: Placement, slices: Sequence[_Slice], shared: Sequence[Attention]
) -> tuple[float, ...]:
    """Return the seconds of recomputation per device for one microbatch, including attention to earlier slices.

    ``shared`` has the attention of every stage.
    """
    runs_again = run.execution.recompute == "full" or run.execution.recomputes("core_attn")
    # Pass I has twice the products of attention in F, and recomputation has them once.
    earlier_share = sum(slice_.earlier for slice_ in slices) / 3 * runs_again
    alone = _per_device(sum, [slice_.step.recompute_seconds for slice_ in slices])
    return tuple(
        seconds + earlier_share * sum(shared[stage].seconds.input for stage in owned)
        for seconds, owned in zip(alone, placement.stages, strict=True)
    )


def _links(slices: Sequence[_Slice]) -> dict[tuple[int, int], float]:
    """Return the seconds of the messages of all slices of a microbatch together, by link.

    The costs give each slice an equal share.
    """
    links: dict[tuple[int, int], float] = {}
    for slice_ in slices:
        assert isinstance(slice_.step.costs.p2p, Mapping), "the planner prices every link"
        for link, seconds in slice_.step.costs.p2p.items():
            links[link] = links.get(link, 0.0) + seconds
    return links


def _memory(slices: Sequence[_Slice], kv_bytes: Sequence[float], execution: Execution) -> dict[Kind, tuple[float, ...]]:
    """Return the bytes by which F, I and W change the held memory, one value per stage and slice.

    ``kv_bytes`` has, per stage, the bytes of a microbatch's keys and values, for the tokens of one context-parallel rank.
    The bytes of F in ``slices`` contain them, unless whole layers are recomputed.
    """
    apart = execution.recompute == "full"
    changes: dict[Kind, list[float]] = {Kind.F: [], Kind.I: [], Kind.W: []}
    for stage, of_rank in enumerate(kv_bytes):
        cached = of_rank * execution.cp
        for place, slice_ in enumerate(slices):
            first, last = place == 0, place == len(slices) - 1
            part = slice_.step.costs.memory_changes(slice_.step.placement)
            own = 0.0 if apart else of_rank * slice_.share
            changes[Kind.F].append(part[Kind.F][stage] - own + cached * first)
            changes[Kind.I].append(part[Kind.I][stage] + own + cached * last - 2 * cached * first)
            changes[Kind.W].append(part[Kind.W][stage])
    return {kind: tuple(values) for kind, values in changes.items()}
