"""A second opinion on vocabulary passes, written apart from the package's simulator and validator on purpose.

It knows what arXiv 2411.05288 says of the data: the embedding output is summed from all shards, the head's input goes to all
shards, statistics come from all and go to all, the loss gradient goes to all, the gradient of the head's input is summed from
all. With one barrier what is summed needs the statistics, with two it is made by T.

Slices of a sequence are units of their own, numbered through. Their forwards run one after the other, their backwards the
other way round, and the loss of all of them, which stands with the last one, needs the statistics of all.
"""

from __future__ import annotations

from collections import Counter

from megatron_pipemem.schedule.schedule import Program, Schedule

COLLECTIVES = ("REDUCE_E", "BCAST_X", "STATS", "BCAST_G", "REDUCE_X", "BCAST_E")
Event = tuple[str, int, int]


def expected(schedule: Schedule) -> Counter[tuple[int, Event]]:
    """``(device, (kind, number, microbatch))`` of all passes and posts of a training step."""
    everywhere = ("EMBED_F", "S", "T", "EMBED_B", *COLLECTIVES)
    found: Counter[tuple[int, Event]] = Counter()
    last = schedule.placement.devices[-1]
    for k in range(schedule.num_microbatches * schedule.slices):
        if k % schedule.slices == schedule.slices - 1:
            found[last, ("LOSS", last, k)] += 1
        found.update((d, (kind, d, k)) for d in range(schedule.num_devices) for kind in everywhere)
    return found


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
    home, n = devices[last], schedule.slices
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


def makespan(schedule: Schedule, seconds: dict[str, float], p2p: float = 0.0, collective: float = 0.0) -> float:
    """First start to last end. ``seconds`` are of a stage's or a shard's action; collectives run one after the other."""
    order = [[(a.kind.value, a.stage, a.microbatch) for a in row] for row in schedule.orders]
    exists = {event for row in order for event in row}
    device_of = {event: device for device, row in enumerate(order) for event in row}
    channel = [(kind, k) for kind, _, k in order[0] if kind in COLLECTIVES]
    end: dict[Event, float] = {}
    arrived: dict[tuple[str, int], float] = {}
    posted: dict[tuple[str, int], list[float]] = {each: [] for each in channel}
    clock, at, free, first = [0.0] * len(order), [0] * len(order), 0.0, None
    served = 0
    while served < len(channel) or any(at[d] < len(row) for d, row in enumerate(order)):
        before = (served, *at)
        for device, row in enumerate(order):
            while at[device] < len(row):
                event = row[at[device]]
                computed, collected = inputs(event, schedule, exists)
                if any(e not in end for e in computed) or any(c not in arrived for c in collected):
                    break
                ready = [end[e] + (p2p if device_of[e] != device else 0.0) for e in computed]
                ready += [arrived[c] for c in collected]
                start = max([clock[device], *ready])
                if event[0] in COLLECTIVES:
                    clock[device] = start  # what is posted must be there
                    posted[event[0], event[2]].append(start)
                else:
                    first = start if first is None else min(first, start)
                    clock[device] = end[event] = start + seconds[event[0]]
                at[device] += 1
        while served < len(channel) and len(posted[channel[served]]) == len(order):
            free = max([free, *posted[channel[served]]]) + collective
            arrived[channel[served]] = free
            served += 1
        assert before != (served, *at), "waits for ever"
    return max(clock) - (first or 0.0)


def hangs(program: Program) -> list[str]:
    """Plays a program where every device serves one queue for all that it posts strictly in order, and where a post that
    brings a result waits for it."""
    schedule = program.schedule
    devices, p = schedule.placement.devices, schedule.num_devices
    rows = [[(a.kind.value, a.stage, a.microbatch) for a in row] for row in program.actions]
    own = [set(row) for row in rows]
    exists = set().union(*own)
    queue: list[list[tuple]] = [[] for _ in range(p)]
    done: set[tuple] = set()
    at = [0] * p

    def ticket(event: Event) -> tuple:
        """Both ends of a message, and all posts of a collective, have the same."""
        kind, number, k = event
        if kind in COLLECTIVES:
            return (kind, k)
        if kind.endswith("_F"):
            return ("F", number if kind == "SEND_F" else number - 1, k)
        return ("I", number if kind == "SEND_I" else number + 1, k)

    def ends(each: tuple) -> range | tuple[int, int]:
        if len(each) == 2:
            return range(p)
        kind, stage, _ = each
        return devices[stage], devices[stage + 1 if kind == "F" else stage - 1]

    moved = True
    while moved:
        moved = False
        for device in range(p):
            while at[device] < len(rows[device]):
                event = rows[device][at[device]]
                if event[0].startswith(("SEND", "RECV")):
                    queue[device].append(ticket(event))
                elif event[0] != "REDUCE_GRAD":
                    computed, collected = inputs(event, schedule, exists)
                    needs = list(collected)
                    for e in computed:
                        here = e in own[device]
                        needs.append(("done", e) if here else ("F" if e[0] == "F" else "I", e[1], e[2]))
                    if any(each not in done for each in needs):
                        break
                    if event[0] in COLLECTIVES:
                        queue[device].append(ticket(event))
                    else:
                        done.add(("done", event))
                at[device] += 1
                moved = True
        for device in range(p):
            while queue[device] and all(queue[d] and queue[d][0] == queue[device][0] for d in ends(queue[device][0])):
                each = queue[device][0]
                done.add(each)
                for d in ends(each):
                    queue[d].pop(0)
                moved = True
    return [f"device {d} stops at {rows[d][at[d]]}" for d in range(p) if at[d] < len(rows[d])] + [
        f"device {d} leaves {queue[d][0]}" for d in range(p) if queue[d]
    ]
