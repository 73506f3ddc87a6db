"""Price embedding and head cut over all pipeline ranks, as a variant of any schedule of one pipeline (arXiv 2411.05288).

Every rank then holds an equal share of both, with its passes and collectives between the others. Collectives go over the
slowest link of the pipeline; that they slow the layers' kernels down is not priced (7 to 8 % of F and B in the paper's
profile).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.config.model import tokens
from megatron_pipemem.config.runs import Run
from megatron_pipemem.planner.activations import message_bytes
from megatron_pipemem.planner.prices import MeasuredSlowdown, gather, logit_bytes
from megatron_pipemem.planner.step import Step, ends_seconds, price
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.vocabulary_costs import VocabularyCosts
from megatron_pipemem.schedule.features.vocabulary.passes import with_vocabulary

_STATISTICS = 3 * 4  # bytes per token: maximum, sum and label's logit


def vocabulary_step(
    barriers: int,
    run: Run,
    placement: Placement,
    pace: MeasuredSlowdown | None = None,
    layers: tuple[int, ...] | None = None,
) -> Step:
    """Price a step with embedding and head cut over all devices, and what their passes take and keep.

    Args:
        barriers: between head and last backward, 1 or 2.
        run: that is planned.
        placement: of its stages.
        pace: how much slower than modelled the passes were measured to be; ``None`` where nothing was measured.
        layers: of every stage; ``None`` lets the partition choose.
    """
    step = price(run, placement, layers, pace, shared_ends=True)
    p, execution = placement.num_devices, run.execution
    cut = run.parallelism
    link = run.cluster.link(p, cut.tp * cut.cp * cut.dp)
    # Predictions of all depths are one head's work, on as many times the tokens.
    depths = run.model.heads_of_output
    hidden, n = depths * message_bytes(run.model, execution), depths * tokens(run.model, execution)
    whole = link.seconds(hidden)  # a ring passes on what it gets while more arrives
    collectives = {
        Kind.REDUCE_E: whole,
        Kind.BCAST_X: whole,
        Kind.REDUCE_X: whole,
        Kind.BCAST_E: whole,
        Kind.STATS: gather(n * _STATISTICS * p, p, link),
        Kind.BCAST_G: gather(n * 4, p, link),
    }
    embedding, head = ends_seconds(run, pace)
    costs = VocabularyCosts.of_head(head, p, barriers, embedding=embedding, collectives=collectives)
    # A shard's logits and the head's input from S to T; with one barrier the two halves of the input's gradient too.
    held = depths * logit_bytes(run.model, execution) / p + hidden * (1 + 2 * (barriers == 1))
    memory = {**(step.costs.memory or {}), Kind.S: (held,) * p, Kind.T: (-held,) * p}
    return replace(step, costs=replace(step.costs, vocabulary=costs, memory=memory))


def vocabulary_cut(barriers: int, schedule: Schedule, step: Step, room: tuple[float, ...]) -> Schedule:
    """Return the schedule with the passes and collectives of a vocabulary that all its devices share.

    Args:
        barriers: of the algorithm.
        schedule: any of one pipeline.
        step: from ``vocabulary_step``.
        room: is not looked at: a cut vocabulary takes what it takes.
    """
    return with_vocabulary(schedule, barriers, step.costs)
