"""Price a run whose microbatches are cut along their sequences into slices of equal length (arXiv 2406.03488, 2504.14519).

A slice is a microbatch of a shorter sequence, whose products lose as much to half-empty waves and whose messages have as much
latency, but for attention:

* causal attention of slice ``j`` of ``n`` sees the slices before it: it takes ``((j + 1)^2 - j^2) / n^2`` of what the whole
  sequence takes. Together they take that, and the last one ``2 n - 1`` times as long as the first;
* keys and values of a microbatch, ``2 groups head_dim s b e / tp`` bytes per layer, are taken whole by F of its first slice,
  and their gradients by I of its last one, the first to run backward. I of the first slice gives both back.

Everything else that F keeps goes by tokens. Buffers are those of a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_pipemem.config.model import Block, Execution, Model, Passes
from megatron_pipemem.config.runs import Run
from megatron_pipemem.planner import counts, prices
from megatron_pipemem.planner.prices import MeasuredSlowdown
from megatron_pipemem.planner.step import Step, price
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.prices import Several, listed


@dataclass(frozen=True)
class Attention:
    """What of a stage's microbatch does not go by tokens.

    Args:
        seconds: of F and I that grow with the square of the sequence, for the whole of it.
        keys: bytes of keys and values.
    """

    seconds: Passes = Passes()
    keys: float = 0.0

    def __add__(self, other: Attention) -> Attention:
        return Attention(self.seconds + other.seconds, self.keys + other.keys)


def why_not_sliced(run: Run) -> str | None:
    """Return why a run's microbatches cannot be cut into as many slices as it says, or not priced so; ``None`` where they can.

    Args:
        run: with its parallelism, and more than one slice.
    """
    model, cut, slices = run.model, run.parallelism, run.schedule.slices or 1
    if run.schedule.overlap_steps:
        return "slices are not planned without a barrier between steps"
    if cut.pp == 1:
        return "slices are for several pipeline ranks"
    if cut.cp > 1:
        return "slices are no use beside context parallelism, which cuts sequences too"
    if model.mtp_layers or any(set(kind) - {Block.ATTENTION, Block.FFN, Block.EXPERTS} for kind in model.kinds):
        return "slices are priced for plain attention alone, without latents, states and multi-token prediction"
    if model.sequence % (2 * slices * (cut.tp if cut.sequence_parallel else 1)):
        return f"{slices} slices do not divide the tokens of a sequence"
    return None


def attention(model: Model, execution: Execution, run: Run, kind: str, pace: Passes) -> Attention:
    """Return what of one layer does not go by tokens.

    Args:
        model: its shape.
        execution: how a microbatch runs on one rank.
        run: supplies the speed of the cluster.
        kind: the blocks of the layer.
        pace: how many times as long as modelled its passes take.
    """
    whole = counts.layer_flops(model, execution, kind)
    half = counts.layer_flops(replace(model, sequence=model.sequence // 2), execution, kind)
    # Of a sum of terms that grow with the sequence and with its square, the latter.
    square = (whole + half * -2) * 2
    seconds = prices.each_pass(lambda flops, slower: flops * slower / run.cluster.flops, square, pace)
    keys = 2 * execution.tokens(model) * execution.key_groups(model) * model.channels * execution.element
    return Attention(seconds, keys * kind.count(Block.ATTENTION))


def sliced_step(
    run: Run,
    placement: Placement,
    layers: tuple[int, ...] | None = None,
    pace: MeasuredSlowdown | None = None,
) -> Step:
    """Price a run whose microbatches are cut into slices: costs are per stage and slice.

    Args:
        run: that ``why_not_sliced`` has nothing against.
        placement: of the stages.
        layers: pieces of every stage; by default the planner's own partition.
        pace: what was measured; by default all is as the formulas say.
    """
    whole, model, n = price(run, placement, layers, pace), run.model, run.schedule.slices or 1
    short = replace(run, model=replace(model, sequence=model.sequence // n))
    part = price(short, placement, whole.layers, pace)
    slower = (pace or MeasuredSlowdown()).layer
    per_layer = {each: attention(model, run.execution, run, each, slower) for each in dict.fromkeys(model.kinds)}
    ends = list(accumulate(whole.layers))
    shared = [
        sum((per_layer[each] for each in model.kinds[end - count : end]), Attention())
        for end, count in zip(ends, whole.layers, strict=True)
    ]
    costs = part.costs
    forward = _seconds(listed(costs.forward), [each.seconds.forward for each in shared], n)
    inputs = _seconds(listed(costs.backward_input), [each.seconds.input for each in shared], n)
    weights = _seconds(listed(costs.backward_weight), [each.seconds.weight for each in shared], n)
    links = {link: n * seconds for link, seconds in _links(costs.p2p).items()}  # a slice's message takes 1/n of these
    memory = _memory(costs.memory or {}, [each.keys for each in shared], n, run.execution.recompute == "full")
    work = tuple(
        sum(sum(table[stage * n : stage * n + n]) for table in (forward, inputs, weights) for stage in owned)
        for owned in placement.stages
    )
    return replace(
        whole,
        costs=replace(costs, forward=forward, backward_input=inputs, backward_weight=weights, p2p=links, memory=memory),
        buffers=part.buffers,
        communication=tuple(n * each for each in part.communication),
        again=_again(run, placement, part, shared, n),
        work=work,
    )


def _seconds(part: Sequence[float], square: Sequence[float], n: int) -> tuple[float, ...]:
    """Return the seconds of every stage and slice, from those of a short sequence and those of the whole one's attention."""
    return tuple(
        seconds + of_whole * ((2 * place + 1) - 1) / n**2
        for seconds, of_whole in zip(part, square, strict=True)
        for place in range(n)
    )


def _again(run: Run, placement: Placement, part: Step, shared: Sequence[Attention], n: int) -> tuple[float, ...]:
    """Return the seconds per microbatch that recompute: what a short sequence's slices take, and the rest of attention."""
    runs_again = run.execution.recompute == "full" or run.execution.recomputes("core_attn")
    rest = (1 - 1 / n) / 3 * runs_again  # I has attention's two products twice, and F's once again
    return tuple(
        n * again + rest * sum(shared[stage].seconds.input for stage in owned)
        for again, owned in zip(part.again, placement.stages, strict=True)
    )


def _links(p2p: float | Mapping[tuple[int, int], float]) -> Mapping[tuple[int, int], float]:
    assert isinstance(p2p, Mapping), "the planner prices every link"
    return p2p


def _memory(part: Mapping[Kind, Several], keys: Sequence[float], n: int, apart: bool) -> dict[Kind, tuple[float, ...]]:
    """Return by how many bytes the passes of every stage and slice change what is held.

    Args:
        part: of the slices as if they were sequences of their own.
        keys: bytes of keys and values of a microbatch, per stage.
        n: slices.
        apart: whether they are not among what F keeps, because all that is recomputed.
    """
    takes: list[float] = []
    gives: list[float] = []
    for saved, freed, cached in zip(listed(part[Kind.F]), listed(part[Kind.I]), keys, strict=True):
        own = saved - (0.0 if apart else cached / n)
        for place in range(n):
            first, last = place == 0, place == n - 1
            takes.append(own + cached * first)
            gives.append(freed + (0.0 if apart else cached / n) + cached * last - 2 * cached * first)
    weights = [value for value in listed(part[Kind.W]) for _ in range(n)]
    return {Kind.F: tuple(takes), Kind.I: tuple(gives), Kind.W: tuple(weights)}
