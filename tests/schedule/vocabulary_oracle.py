"""A second opinion on vocabulary passes, written apart from the package's simulator and validator on purpose.

It knows what arXiv 2411.05288 says of the data: the embedding output is summed from all shards, the head's input goes to all
shards, statistics come from all and go to all, the loss gradient goes to all, the gradient of the head's input is summed from
all. With one barrier what is summed needs the statistics, with two it is made by T.

Slices of a sequence are units of their own, numbered through. Their forwards run one after the other, their backwards the
other way round, and the loss of all of them, which stands with the last one, needs the statistics of all.
"""

from __future__ import annotations

from collections import Counter

from megatron_pipemem.schedule.schedule import Schedule

COLLECTIVES = ("REDUCE_E", "BCAST_X", "STATS", "BCAST_G", "REDUCE_X", "BCAST_E")
Event = tuple[str, int, int]


def expected(schedule: Schedule) -> Counter[tuple[int, Event]]:
    """``(device, (kind, number, microbatch))`` of all passes and posts of a training step."""
    everywhere = ("EMBED_F", "S", "T", "EMBED_B", *COLLECTIVES)
    counts: Counter[tuple[int, Event]] = Counter()
    last = schedule.placement.devices[-1]
    for k in range(len(schedule.units)):
        if k % schedule.units.parts == schedule.units.parts - 1:
            counts[last, ("LOSS", last, k)] += 1
        counts.update((d, (kind, d, k)) for d in range(schedule.num_devices) for kind in everywhere)
    return counts


def present(schedule: Schedule) -> Counter[tuple[int, Event]]:
    """The same of what stands in the orders."""
    return Counter(
        (device, (a.kind.value, a.stage, a.microbatch))
        for device, order in enumerate(schedule.orders)
        for a in order
        if a.kind.value not in ("F", "I", "W", "B")
    )


def inputs(event: Event, schedule: Schedule, exists: set[Event]) -> tuple[list[Event], list[tuple[str, int]]]:
    """What an event needs: compute events, and collectives as a whole."""
    kind, number, k = event
    devices = schedule.placement.devices
    last = len(devices) - 1
    home, n = devices[last], schedule.units.parts
    siblings = [unit for unit in range(schedule.num_microbatches * n) if unit // n == k // n]
    loss = ("LOSS", home, siblings[-1])

    def backward(stage: int, unit: int = k) -> Event:
        return ("B", stage, unit) if ("B", stage, unit) in exists else ("I", stage, unit)

    if kind == "F":
        earlier = [("F", number, k - 1)] if k - 1 in siblings else []
        return [*earlier, ("F", number - 1, k)] if number else earlier, [] if number else [("REDUCE_E", k)]
    if kind in ("I", "B"):
        later = [backward(number, k + 1)] if k + 1 in siblings else []
        if number < last:
            return [*later, ("F", number, k), backward(number + 1)], []
        return [*later, ("F", last, k), loss], [("REDUCE_X", k)]
    if kind == "W":
        return [("I", number, k)], []
    if kind == "LOSS":
        return [], [("STATS", unit) for unit in siblings]
    if kind in ("S", "T", "EMBED_B"):
        source = {"S": "BCAST_X", "T": "BCAST_G", "EMBED_B": "BCAST_E"}[kind]
        return [("S", number, k)] if kind == "T" else [], [(source, k)]
    if kind == "REDUCE_X" and schedule.vocabulary_barriers == 1:
        return [], [("STATS", k)]
    own = {"REDUCE_E": "EMBED_F", "STATS": "S", "REDUCE_X": "T"}
    if kind in own:
        return [(own[kind], number, k)], []
    root = {"BCAST_X": ("F", last, k), "BCAST_G": loss, "BCAST_E": backward(0)}
    if kind in root:
        source = root[kind]
        at = source[1] if kind == "BCAST_G" else devices[source[1]]
        return [source] if number == at else [], []
    return [], []
