"""The shortest step of a tiny problem, by all orders there are; it shares no code with the package.

Full backwards (B) count as one action, as they do in the package's peaks: what I takes is not held after a B. The weight
gradients of a stage run in microbatch order. Microbatches are alike, so forwards and input gradients do so without loss.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiny(NamedTuple):
    """A problem in whole numbers.

    Args:
        devices: the device of every stage.
        m: microbatches.
        ticks: of F, I and W, per stage.
        changes: of what the device holds, after F, I and W, per stage; a B changes it by those of I and W together.
        caps: the most every device may hold after any action; ``None`` is no limit.
        lag: ticks of a message between two devices.
        full_backwards: whether orders may have B.
    """

    devices: tuple[int, ...]
    m: int
    ticks: tuple[tuple[int, ...], ...]
    changes: tuple[tuple[int, ...], ...]
    caps: tuple[float, ...] | None = None
    lag: int = 0
    full_backwards: bool = True


# How many F, I and W of every stage have run, stage by stage.
_Counts = tuple[int, ...]
# When every device is free; and per count, when what these passes have sent to other devices arrives, until it is used.
_Way = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def shortest(tiny: Tiny) -> int | None:
    """The least makespan; ``None`` when no order keeps the caps.

    What has run says what is held. Of the ways to have run it, only those are kept that no other one beats in all times
    that matter from there on: when the devices are free, and when what has not been used yet arrives.
    """
    size = 3 * len(tiny.devices)
    whole = (tiny.m,) * size
    begun: list[dict[_Counts, set[_Way]]] = [{} for _ in range(size * tiny.m + 1)]
    begun[0] = {(0,) * size: {((0,) * (max(tiny.devices) + 1), ((),) * size)}}
    for done, beginnings in enumerate(begun[:-1]):
        for counts, ways in beginnings.items():
            ways = _not_beaten(ways)
            for stage in range(len(tiny.devices)):
                for kinds in ((0,), (1,), (2,), (1, 2))[: 4 if tiny.full_backwards else 3]:
                    after = _counted(tiny, counts, stage, kinds)
                    if after is not None:
                        longer = begun[done + len(kinds)].setdefault(after, set())
                        longer.update(_run(tiny, way, stage, kinds) for way in ways)
        beginnings.clear()
    return min((max(free) for free, _ in begun[-1].get(whole, ())), default=None)


def _counted(tiny: Tiny, counts: _Counts, stage: int, kinds: tuple[int, ...]) -> _Counts | None:
    """With one more action; ``None`` if that may not run now."""
    after = list(counts)
    for kind in kinds:
        after[3 * stage + kind] += 1
    f, i, w = after[3 * stage : 3 * stage + 3]
    first, last = stage == 0, stage == len(tiny.devices) - 1
    if f > (tiny.m if first else after[3 * stage - 3]) or i > min(f, f if last else after[3 * stage + 4]) or w > i:
        return None
    if len(kinds) == 2 and w < i:
        return None  # the W of an earlier microbatch would come after this one's
    if tiny.caps is None:
        return tuple(after)
    device = tiny.devices[stage]
    held = sum(
        after[3 * s + kind] * tiny.changes[kind][s]
        for s in range(len(tiny.devices))
        if tiny.devices[s] == device
        for kind in range(3)
    )
    return tuple(after) if held <= tiny.caps[device] else None


def _run(tiny: Tiny, way: _Way, stage: int, kinds: tuple[int, ...]) -> _Way:
    """When it is run as soon as it can be."""
    free, arrivals = way
    device, now = tiny.devices[stage], free[tiny.devices[stage]]
    arrivals = list(arrivals)
    source, user = {0: (stage - 1, stage + 1), 1: (stage + 1, stage - 1), 2: (-1, -1)}[kinds[0]]
    if 0 <= source < len(tiny.devices) and tiny.devices[source] != device:
        queue = arrivals[3 * source + kinds[0]]
        now, arrivals[3 * source + kinds[0]] = max(now, queue[0]), queue[1:]
    now += sum(tiny.ticks[kind][stage] for kind in kinds)
    if 0 <= user < len(tiny.devices) and tiny.devices[user] != device:
        arrivals[3 * stage + kinds[0]] += (now + tiny.lag,)
    return (*free[:device], now, *free[device + 1 :]), tuple(arrivals)


def _not_beaten(ways: set[_Way]) -> list[_Way]:
    kept: dict[tuple[int, ...], _Way] = {}
    for free, arrivals in sorted(ways):
        times = (*free, *(time for queue in arrivals for time in queue))
        if not any(all(a <= b for a, b in zip(other, times, strict=True)) for other in kept):
            kept[times] = (free, arrivals)
    return list(kept.values())
