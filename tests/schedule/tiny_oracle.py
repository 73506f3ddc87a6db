"""The shortest step of a tiny problem, by all orders there are; it shares no code with the package.

Full backwards (B) count as one action, as they do in the package's peaks: the memory that I takes is not held after a B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Tiny(NamedTuple):
    """A problem in whole numbers.

    Args:
        devices: the device of every stage.
        ticks: of F, I, W and B of a stage and a microbatch.
        message: ticks of a microbatch's message between two devices.
        changes: of a device's memory, by F, I and W of a stage and a microbatch; B changes it as I and W together.
        caps: the most every device may hold after any action; ``None`` is no limit.
        m: microbatches.
        kinds: of the passes that orders may have.
        slices: of a sequence; each of them counts as a microbatch above, and ``m`` counts them all.
        in_order: whether each pass of a stage runs in the order of microbatches. Where these are alike, only the order of
            weight gradients makes a difference.
    """

    devices: tuple[int, ...]
    ticks: Callable[[int, int, int], int]
    message: Callable[[int], int]
    changes: Callable[[int, int, int], int]
    caps: tuple[float, ...] | None
    m: int
    kinds: str = "FIWB"
    slices: int = 1
    in_order: bool = False


_F, _I, _W, _B = range(4)  # places in "FIWB"
Pass = tuple[int, int, int]


def shortest(tiny: Tiny) -> int | None:
    """The least makespan of all orders; ``None`` when none keeps the caps.

    Of the ways to have run the same passes, those are kept that no other beats in all times that matter from there on.
    """
    stages, last = range(len(tiny.devices)), len(tiny.devices) - 1
    whole = frozenset((kind, stage, k) for kind in (_F, _I, _W) for stage in stages for k in range(tiny.m))
    kinds = ["FIWB".index(kind) for kind in tiny.kinds]
    idle = (0,) * (max(tiny.devices) + 1)
    layers: list[dict[frozenset[Pass], set]] = [{} for _ in range(len(whole) + 1)]
    layers[0] = {frozenset(): {(idle, ())}}

    def sources(kind: int, stage: int, k: int) -> list[Pass]:
        if kind == _F:
            attends = [(_F, stage, k - 1)] if k % tiny.slices else []
            return [(_F, stage - 1, k), *attends] if stage else attends
        if kind == _W:
            return [(_I, stage, k)]
        adds = [(_I, stage, k + 1)] if (k + 1) % tiny.slices else []
        return [(_F, stage, k), *adds, *([(_I, stage + 1, k)] if stage < last else [])]

    def awaited(done: frozenset[Pass]) -> list[Pass]:
        """Return the results that another device has still to use."""
        return sorted(
            action
            for action in done
            if action[0] != _W
            and 0 <= (user := action[1] + (1 if action[0] == _F else -1)) <= last
            and tiny.devices[user] != tiny.devices[action[1]]
            and (action[0], user, action[2]) not in done
        )

    for count, layer in enumerate(layers[:-1]):
        for done, ways in layer.items():
            known, ways = awaited(done), _not_beaten(ways)
            for kind, stage, k in ((kind, s, k) for kind in kinds for s in stages for k in range(tiny.m)):
                new = {(_I, stage, k), (_W, stage, k)} if kind == _B else {(kind, stage, k)}
                needed = sources(_I if kind == _B else kind, stage, k)
                if tiny.in_order and k:
                    needed += [(action, stage, k - 1) for action, _, _ in new]
                if new & done or not done.issuperset(needed) or not _keeps(tiny, after := done | new, stage):
                    continue
                coming, device = awaited(after), tiny.devices[stage]
                for free, times in ways:
                    ends = dict(zip(known, times, strict=True))
                    arrivals = [
                        ends[action] + tiny.message(k) for action in needed if tiny.devices[action[1]] != device
                    ]
                    now = max([free[device], *arrivals]) + tiny.ticks(kind, stage, k)
                    ends |= dict.fromkeys(new, now)
                    way = (*free[:device], now, *free[device + 1 :]), tuple(ends[action] for action in coming)
                    layers[count + len(new)].setdefault(after, set()).add(way)
        layer.clear()
    return min((max(free) for free, _ in layers[-1].get(whole, ())), default=None)


def _keeps(tiny: Tiny, done: frozenset[Pass], stage: int) -> bool:
    if tiny.caps is None:
        return True
    device = tiny.devices[stage]
    return sum(tiny.changes(*action) for action in done if tiny.devices[action[1]] == device) <= tiny.caps[device]


def _not_beaten(ways: set) -> list:
    kept: list = []
    for way in sorted(ways):
        times = (*way[0], *way[1])
        if not any(all(a <= b for a, b in zip((*other[0], *other[1]), times, strict=True)) for other in kept):
            kept.append(way)
    return kept
