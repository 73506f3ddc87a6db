"""A second opinion on offload and recomputation, written apart from the package's simulator and validator on purpose."""

from __future__ import annotations

import step_oracle
from step_oracle import Event, Played

from megatron_pipemem.schedule.schedule import Schedule


def mistakes(schedule: Schedule) -> list[str]:
    """Why the activations of some backward are not there, or are moved to no purpose; empty when all is well.

    Only what concerns offload and recomputation: the rest of the schedule is taken to be right.
    """
    problems = []
    for order in schedule.orders:
        words = [(action.kind.value, action.stage, action.microbatch) for action in order]
        recomputed = {stage: word for word, stage, _ in words if word in ("R", "RS")}
        for stage, k in {(stage, k) for _, stage, k in words}:
            story = [word for word, *key in words if key == [stage, k] and word != "W"]
            backward = story[-1] if story[-1] in ("I", "B") else "nothing"
            kept = ["F", backward]
            round_trip = ["OFFLOAD", "WAIT_OFFLOAD", "RELOAD", "WAIT_RELOAD"]
            away = ["F", *round_trip, backward]
            right = {
                None: [kept, away],
                "R": [["F", "R", backward]],
                "RS": [["F", "RS", backward], ["F", *round_trip, "RS", backward]],
            }
            if story == ["F"]:
                continue
            if backward == "nothing" or story not in right[recomputed.get(stage)]:
                problems.append(f"stage {stage}, microbatch {k}: {story}")
    return problems


def play(
    schedule: Schedule,
    seconds: dict[str, float],
    p2p: float = 0.0,
    duplex: bool = False,
    switches: tuple[tuple[int, ...], ...] = (),
    dropped: float = 0.0,
) -> Played:
    """Run it, and count chunks.

    Args:
        schedule: without mistakes.
        seconds: of a chunk's F, I, W, B, R, RS, and OFFLOAD and RELOAD of a whole one.
        p2p: of a message between devices.
        duplex: whether copies of the two directions run side by side.
        switches: devices that share a channel.
        dropped: the part of a chunk that a forward followed by RS leaves out; it is neither held nor copied.
    """
    partly = {action.stage for order in schedule.orders for action in order if action.kind.value == "RS"}
    channel = {device: group[0] for group in switches for device in group}

    def of(event: Event) -> float:
        kind, stage, _ = event
        return seconds[kind] * (1 - dropped if kind in ("OFFLOAD", "RELOAD") and stage in partly else 1)

    def lane(device: int, kind: str) -> tuple[int, str]:
        return channel.get(device, device), kind if duplex else "both"

    return step_oracle.play(schedule, of, lambda unit: p2p, lambda unit: 1.0, dropped, lane=lane)
