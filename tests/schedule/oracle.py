"""A second opinion on schedules, written apart from the package's simulator and validator on purpose.

It knows only what a schedule means: every microbatch goes forward through all stages and backward through all stages,
a device does one thing at a time in its order, and a forward's activations stay until the pass that finishes its weight
gradient. Everything is worked out on one explicit graph of all actions.

Where there are several replicas of the model, "all stages" are those of one of them. Where microbatches are cut into
sequence slices, a node is about one slice, and attention makes slices wait for one another: forward for the slice before,
backward for the slice behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

from megatron_pipemem.schedule.schedule import Schedule

Node = tuple[str, int, int]  # letter, stage, microbatch (or slice, counted through all microbatches)


def check(schedule: Schedule) -> list[str]:
    """Every reason why ``schedule`` is not a correct training step; empty when it is."""
    return _misplaced(schedule) or _incomplete(schedule) or _deadlocked(schedule)


def disordered_weight_gradients(schedule: Schedule) -> list[str]:
    """Stages whose weight gradients are not accumulated in the order of the microbatches."""
    problems, places = [], places_of(schedule)
    for stage in range(schedule.num_stages):
        order = schedule.orders[schedule.placement.devices[stage]]
        units = [a.microbatch for a in order if a.stage == stage and a.kind.value in "WB"]
        ran = [(places[unit][0], -places[unit][1]) for unit in units]
        if ran != sorted(ran):
            problems.append(f"stage {stage} accumulates the weight gradients of microbatches {ran}")
    return problems


def places_of(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Of every unit its microbatch, its place therein, and how many parts follow it."""
    sizes = [after - before for before, after in pairwise((0, *schedule.units.ends))]
    return [(microbatch, part, size - 1 - part) for microbatch, size in enumerate(sizes) for part in range(size)]


def peak(schedule: Schedule) -> list[Fraction]:
    """Per device, the most it holds at once; 1 is the whole model's activations of one microbatch."""
    highest = []
    for order in schedule.orders:
        held: set[tuple[int, int]] = set()
        most = 0
        for kind, stage, microbatch in order:
            if kind.value == "F":
                held.add((stage, microbatch))
            elif kind.value in "WB":
                held.remove((stage, microbatch))
            most = max(most, len(held))
        highest.append(Fraction(most, _copy(schedule) * schedule.units.parts))
    return highest


def versions(schedule: Schedule) -> dict[Node, int]:
    """Which version of its stage's weights every action of an asynchronous schedule uses."""
    every, delay = schedule.updates.every, schedule.updates.delay
    places = {}
    for order in _nodes(schedule):
        for position, (letter, stage, unit) in enumerate(order):
            if letter == "F":
                group = unit // schedule.units.parts // every
                made = _made(schedule, order[:position], stage)
                version = made if delay is None else max(group - delay, 0)
                places |= {(letter, stage, unit): version for letter in "FIWB" if (letter, stage, unit) in order}
    return places


def lost_versions(schedule: Schedule) -> list[str]:
    """Actions of an otherwise correct asynchronous schedule whose stage has their version not yet, or no longer."""
    used, kept, problems = versions(schedule), schedule.updates.kept, []
    for order in _nodes(schedule):
        for position, node in enumerate(order):
            made = _made(schedule, order[:position], node[1])
            if not made - kept < used[node] <= made:
                problems.append(f"{node} uses version {used[node]} of {made}")
    return problems


def versions_kept(schedule: Schedule) -> list[int]:
    """Per device, the largest number of versions of one stage that have to be there after any of its actions."""
    used = versions(schedule)
    most = []
    for order in _nodes(schedule):
        counts = [1]
        for done in range(1, len(order) + 1):
            for stage in {stage for _, stage, _ in order}:
                wanted = {used[node] for node in order[done:] if node[1] == stage}
                newest = _made(schedule, order[:done], stage)
                counts.append(len({version for version in wanted if version < newest}) + 1)
        most.append(max(counts))
    return most


def _made(schedule: Schedule, done: list[Node], stage: int) -> int:
    """How many updates a stage has made when its device has done these."""
    every, slices = schedule.updates.every, schedule.units.parts
    ran = sum(letter in "WB" and other == stage for letter, other, _ in done)
    if ran == schedule.num_microbatches * slices:
        return -(-schedule.num_microbatches // every)  # the last group may be smaller
    return ran // (every * slices)


def makespan(schedule: Schedule, f: float, i: float, w: float, p2p: float = 0) -> float:
    """First start to last end when nothing waits longer than it must.

    Args:
        schedule: a schedule that passes ``check``.
        f, i, w: seconds of forward, input gradient and weight gradient of a device's whole share of one microbatch.
        p2p: seconds between the end of a pass and its start on another device.
    """
    seconds = {"F": f, "I": i, "W": w, "B": i + w}
    chunks = Counter(schedule.placement.devices)

    def of(letter: str, stage: int, part: int) -> float:
        share = chunks[schedule.placement.devices[stage]] / schedule.placement.replicas * schedule.units.parts
        return seconds[letter] / share

    return makespan_of(schedule, of, p2p)


def makespan_of(schedule: Schedule, seconds: Callable[[str, int, int], float], p2p: float = 0) -> float:
    """As ``makespan``, where every letter, stage and slice takes its own ``seconds``, B too."""
    before, places = _graph(schedule), places_of(schedule)
    device_of = {node: device for device, order in enumerate(_nodes(schedule)) for node in order}
    end: dict[Node, float] = {}
    start: dict[Node, float] = {}
    for node in _topological(before):
        device = device_of[node]
        link = p2p / schedule.units.parts
        arrivals = [end[other] + (link if device_of[other] != device else 0) for other in before[node]]
        start[node] = max(arrivals, default=0)
        letter, stage, unit = node
        end[node] = start[node] + seconds(letter, stage, places[unit][1])
    return max(end.values()) - min(start.values())


def _copy(schedule: Schedule) -> int:
    """Stages of one copy of the model."""
    return schedule.num_stages // schedule.placement.replicas


def _nodes(schedule: Schedule) -> list[list[Node]]:
    return [[(a.kind.value, a.stage, a.microbatch) for a in order] for order in schedule.orders]


def _misplaced(schedule: Schedule) -> list[str]:
    problems = []
    for device, order in enumerate(_nodes(schedule)):
        for letter, stage, microbatch in order:
            name = f"{stage}{letter}{microbatch}"
            if letter not in ("F", "I", "W", "B"):
                problems.append(f"{name} on device {device} is no compute action")
            elif not 0 <= stage < schedule.num_stages or schedule.placement.devices[stage] != device:
                problems.append(f"{name} does not belong on device {device}")
            elif microbatch is None or not 0 <= microbatch < len(places_of(schedule)):
                problems.append(f"{name} is of no microbatch of the step")
    return problems


def _incomplete(schedule: Schedule) -> list[str]:
    count = Counter(node for order in _nodes(schedule) for node in order)
    size, problems = _copy(schedule), []
    for microbatch in range(schedule.num_microbatches):
        units = [unit for unit, place in enumerate(places_of(schedule)) if place[0] == microbatch]
        ran = [
            ["".join(letter * count[letter, stage, unit] for letter in "FIWB") for stage in stages for unit in units]
            for stages in (range(first, first + size) for first in range(0, schedule.num_stages, size))
        ]
        used = [replica for replica in ran if any(replica)]
        if len(used) != 1 or not set(used[0]) <= {"FB", "FIW"}:
            problems.append(f"microbatch {microbatch} runs {ran}, per replica")
    return problems


def _graph(schedule: Schedule) -> dict[Node, list[Node]]:
    """For every action of a complete schedule, all that must end before it starts."""
    orders = _nodes(schedule)
    exists = {node for order in orders for node in order}
    size, places = _copy(schedule), places_of(schedule)
    before: dict[Node, list[Node]] = {node: [] for node in exists}
    for order in orders:
        for earlier, later in zip(order, order[1:], strict=False):
            before[later].append(earlier)
    for letter, stage, microbatch in exists:
        needed = before[letter, stage, microbatch]
        if letter == "F" and stage % size > 0:
            needed.append(("F", stage - 1, microbatch))
        if letter == "F" and places[microbatch][1] > 0:
            needed.append(("F", stage, microbatch - 1))
        if letter in ("I", "B"):
            needed.append(("F", stage, microbatch))
            neighbours = [(stage + 1, microbatch)] if stage % size < size - 1 else []
            neighbours += [(stage, microbatch + 1)] if places[microbatch][2] > 0 else []
            needed += [("I" if ("I", *other) in exists else "B", *other) for other in neighbours]
        if letter == "W":
            needed.append(("I", stage, microbatch))
    return before


def _topological(before: dict[Node, list[Node]]) -> list[Node]:
    """As many nodes as can run, each after all that it needs."""
    missing = {node: len(needed) for node, needed in before.items()}
    after: dict[Node, list[Node]] = {node: [] for node in before}
    for node, needed in before.items():
        for other in needed:
            after[other].append(node)
    ready = [node for node, count in missing.items() if count == 0]
    for node in ready:
        for other in after[node]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return ready


def _deadlocked(schedule: Schedule) -> list[str]:
    before = _graph(schedule)
    ran = set(_topological(before))
    return [
        f"{stage}{letter}{microbatch} can never run" for letter, stage, microbatch in sorted(set(before) - ran, key=str)
    ]
