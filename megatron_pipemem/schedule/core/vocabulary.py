"""Say what the passes and collectives of vocabulary parallelism wait for, and which of them there are."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.placement import Placement

EVERYWHERE = -1
"""In place of a device: a collective that all devices have posted."""
BARRIERS = (1, 2)
BARRIERS_OF_ALGORITHM = {1: 2, 2: 1}
"""The paper's Algorithm 1 has two barriers, its Algorithm 2 one. Users name the algorithm, schedules count barriers."""

_OF_ALL = {Kind.EMBED_F: Kind.REDUCE_E, Kind.S: Kind.STATS, Kind.T: Kind.REDUCE_X}
"""The collective that every device brings the result of a pass to."""


def check_placement(placement: Placement) -> None:
    """Raises:
    UnsupportedError: there is no device for every shard, or more than one replica of the model.
    """
    if placement.replicas > 1:
        raise UnsupportedError(
            "vocabulary parallelism cuts head and embedding of one model copy, and this placement holds "
            f"{placement.replicas}; take a schedule with one pipeline"
        )
    if placement.devices[: placement.num_devices] != tuple(range(placement.num_devices)):
        raise UnsupportedError(
            "vocabulary parallelism needs stage d on device d for the first stages, as linear, interleaved, V and wave "
            f"placements have it; this one has {placement.devices}"
        )


def vocabulary_needs(
    action: Action, placement: Placement, barriers: int, has_full_backward: bool = False
) -> tuple[Action, ...]:
    """Return what ``action`` needs besides what it needs without vocabulary parallelism.

    A collective that is needed has ``EVERYWHERE`` for its stage: every device must have posted it. With one barrier
    ``REDUCE_X`` needs the statistics: what it sums is formed from them, where it is posted, so there the device waits for
    them.

    Args:
        action: any action of an order.
        placement: supplies the first and the last stage.
        barriers: 1 or 2.
        has_full_backward: whether the first stage's backward of this microbatch is a B.
    """
    kind, stage, microbatch = action
    last = placement.num_stages - 1
    if kind is Kind.F:
        return (Action(Kind.REDUCE_E, EVERYWHERE, microbatch),) if stage == 0 else ()
    if kind is Kind.I or kind is Kind.B:
        if stage != last:
            return ()
        gradient = (Action(Kind.REDUCE_X, EVERYWHERE, microbatch),)
        # With two barriers T has waited for the loss already.
        return (*gradient, Action(Kind.LOSS, placement.devices[last], microbatch)) if barriers == 1 else gradient
    if kind is Kind.BCAST_X:
        return (Action(Kind.F, last, microbatch),) if stage == placement.devices[last] else ()
    if kind is Kind.BCAST_G:
        return (Action(Kind.LOSS, stage, microbatch),) if stage == placement.devices[last] else ()
    if kind is Kind.BCAST_E:
        backward = Kind.B if has_full_backward else Kind.I
        return (Action(backward, 0, microbatch),) if stage == placement.devices[0] else ()
    if kind is Kind.REDUCE_X and barriers == 1:
        return (Action(Kind.STATS, EVERYWHERE, microbatch),)
    for compute, collective in _OF_ALL.items():
        if kind is collective:
            return (Action(compute, stage, microbatch),)
    if kind in _AWAITED:
        return (Action(_AWAITED[kind], EVERYWHERE, microbatch),)
    return ()


_AWAITED = {Kind.S: Kind.BCAST_X, Kind.LOSS: Kind.STATS, Kind.T: Kind.BCAST_G, Kind.EMBED_B: Kind.BCAST_E}


def vocabulary_actions(placement: Placement, num_microbatches: int, backwards: bool) -> Iterator[tuple[int, Action]]:
    """Yield ``(device, action)`` of everything that vocabulary parallelism adds to a step.

    Args:
        placement: of the stages.
        num_microbatches: of one step.
        backwards: whether the step runs backward.
    """
    everywhere = [Kind.EMBED_F, Kind.REDUCE_E, Kind.BCAST_X, Kind.S, Kind.STATS]
    if backwards:
        everywhere += [Kind.BCAST_G, Kind.T, Kind.REDUCE_X, Kind.BCAST_E, Kind.EMBED_B]
    for microbatch in range(num_microbatches):
        for device in range(placement.num_devices):
            for kind in everywhere:
                yield device, Action(kind, device, microbatch)
        last = placement.devices[-1]
        yield last, Action(Kind.LOSS, last, microbatch)
