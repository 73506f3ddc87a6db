"""A second opinion on offload and recomputation, written apart from the package's simulator and validator on purpose.

It plays a step literally: at every moment the device that can go on soonest does, one channel per group of devices keeps a list
of the copies it was given, and two sets per device say where every forward's activations are.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_pipemem.schedule.schedule import Schedule


class Played(NamedTuple):
    """What a step came to: seconds, counts of chunks, and per device what it waited for copies."""

    makespan: float
    device_peaks: list[float]
    host_peaks: list[float]
    waited: list[float]
    copies: list[list[tuple[str, float, float]]]
    issued: list[list[float]]


def mistakes(schedule: Schedule) -> list[str]:
    """Why the activations of some backward are not there, or are moved to no purpose; empty when all is well.

    Only what concerns offload and recomputation: the rest of the schedule is taken to be right.
    """
    found = []
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
                found.append(f"stage {stage}, microbatch {k}: {story}")
    return found


def play(
    schedule: Schedule,
    seconds: dict[str, float],
    p2p: float = 0.0,
    duplex: bool = False,
    switches: tuple[tuple[int, ...], ...] = (),
    dropped: float = 0.0,
) -> Played:
    """Run it.

    Args:
        schedule: without mistakes.
        seconds: of a chunk's F, I, W, B, R, RS, and OFFLOAD and RELOAD of a whole one.
        p2p: of a message between devices.
        duplex: whether copies of the two directions run side by side.
        switches: devices that share a channel.
        dropped: the part of a chunk that a forward followed by RS leaves out; it is neither held nor copied.
    """
    device_of = schedule.placement.devices
    recomputed = {action.stage for order in schedule.orders for action in order if action.kind.value == "R"}
    partly = {action.stage for order in schedule.orders for action in order if action.kind.value == "RS"}
    backward = {
        (action.stage, action.microbatch): action.kind.value
        for order in schedule.orders
        for action in order
        if action.kind.value in "IB"
    }
    count = len(schedule.orders)
    clock, position = [0.0] * count, [0] * count
    begun: list[float] = []
    ended: dict[tuple[str, int, int], float] = {}
    channel = {device: next((group[0] for group in switches if device in group), device) for device in range(count)}
    busy: dict[tuple[int, str], float] = {}
    # Of what RS makes there is a third number in the key.
    held: list[set[tuple[int, ...]]] = [set() for _ in range(count)]
    host: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    peaks, host_peaks, waited = [0.0] * count, [0.0] * count, [0.0] * count
    copies: list[list[tuple[str, float, float]]] = [[] for _ in range(count)]
    issued: list[list[float]] = [[] for _ in range(count)]

    def size_of(key: tuple[int, ...]) -> float:
        if key[0] not in partly:
            return 1.0
        return dropped if len(key) == 3 else 1 - dropped

    def earliest(device: int) -> float | None:
        if position[device] == len(schedule.orders[device]):
            return None
        action = schedule.orders[device][position[device]]
        word, stage, k = action.kind.value, action.stage, action.microbatch
        needed = []
        if word == "F" and stage > 0:
            needed.append(("F", stage - 1, k))
        if word in ("I", "B") and stage + 1 < len(device_of):
            needed.append((backward[stage + 1, k], stage + 1, k))
        at = clock[device]
        for other in needed:
            if other not in ended:
                return None
            at = max(at, ended[other] + (p2p if device_of[other[1]] != device else 0.0))
        return at

    while any(position[device] < len(schedule.orders[device]) for device in range(count)):
        possible = [(at, device) for device in range(count) if (at := earliest(device)) is not None]
        at, device = min(possible)
        action = schedule.orders[device][position[device]]
        word, stage, k = action.kind.value, action.stage, action.microbatch
        key = (stage, k)
        if word in ("OFFLOAD", "RELOAD"):
            lane = (channel[device], word if duplex else "both")
            start = max(at, busy.get(lane, 0.0))
            size = 1 - dropped if stage in partly else 1
            busy[lane] = ended[word, stage, k] = start + seconds[word] * size
            copies[device].append((str(action), start, busy[lane]))
            clock[device] = at
            issued[device].append(at)
            (host if word == "OFFLOAD" else held)[device].add(key)
        elif word.startswith("WAIT"):
            clock[device] = max(at, ended[word.removeprefix("WAIT_"), stage, k])
            waited[device] += clock[device] - at
            (held if word == "WAIT_OFFLOAD" else host)[device].remove(key)
        else:
            begun.append(at)
            clock[device] = ended[word, stage, k] = at + seconds[word]
            if word == "F" and stage not in recomputed or word == "R":
                held[device].add(key)
            elif word == "RS":
                assert key in held[device], f"{action} finds nothing"
                held[device].add((*key, 1))
            elif word in ("I", "B"):
                assert key in held[device], f"{action} finds nothing"
                assert stage not in partly or (*key, 1) in held[device], f"{action} finds a part of it"
            if word in ("W", "B"):
                held[device] -= {key, (*key, 1)}
        position[device] += 1
        peaks[device] = max(peaks[device], sum(map(size_of, held[device])))
        host_peaks[device] = max(host_peaks[device], sum(map(size_of, host[device])))
    return Played(max(clock) - min(begun), peaks, host_peaks, waited, copies, issued)
