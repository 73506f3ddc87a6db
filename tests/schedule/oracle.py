"""A second opinion on schedules, written apart from the package's simulator and validator on purpose.

It knows only what a schedule means: every microbatch goes forward through all stages and backward through all stages,
a device does one thing at a time in its order, and a forward's activations stay until the pass that finishes its weight
gradient. Everything is worked out on one explicit graph of all actions.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from megatron_pipemem.schedule.schedule import Schedule

Node = tuple[str, int, int]  # letter, stage, microbatch


def check(schedule: Schedule) -> list[str]:
    """Every reason why ``schedule`` is not a correct training step; empty when it is."""
    return _misplaced(schedule) or _incomplete(schedule) or _deadlocked(schedule)


def disordered_weight_gradients(schedule: Schedule) -> list[str]:
    """Stages whose weight gradients are not accumulated in the order of the microbatches."""
    found = []
    for stage in range(schedule.num_stages):
        order = schedule.orders[schedule.placement.device_of(stage)]
        ran = [a.microbatch for a in order if a.stage == stage and a.kind.value in "WB"]
        if ran != sorted(ran):
            found.append(f"stage {stage} accumulates the weight gradients of microbatches {ran}")
    return found


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
        highest.append(Fraction(most, schedule.num_stages))
    return highest


def makespan(schedule: Schedule, f: float, i: float, w: float, p2p: float = 0) -> float:
    """First start to last end when nothing waits longer than it must.

    Args:
        schedule: a schedule that passes ``check``.
        f, i, w: seconds of forward, input gradient and weight gradient of a device's whole share of one microbatch.
        p2p: seconds between the end of a pass and its start on another device.
    """
    seconds = {"F": f, "I": i, "W": w, "B": i + w}
    before = _graph(schedule)
    device_of = {node: device for device, order in enumerate(_nodes(schedule)) for node in order}
    chunks = Counter(schedule.placement.devices)
    end: dict[Node, float] = {}
    start: dict[Node, float] = {}
    for node in _topological(before):
        device = device_of[node]
        arrivals = [end[other] + (p2p if device_of[other] != device else 0) for other in before[node]]
        start[node] = max(arrivals, default=0)
        end[node] = start[node] + seconds[node[0]] / chunks[device]
    return max(end.values()) - min(start.values())


def _nodes(schedule: Schedule) -> list[list[Node]]:
    return [[(a.kind.value, a.stage, a.microbatch) for a in order] for order in schedule.orders]


def _misplaced(schedule: Schedule) -> list[str]:
    found = []
    for device, order in enumerate(_nodes(schedule)):
        for letter, stage, microbatch in order:
            name = f"{stage}{letter}{microbatch}"
            if letter not in ("F", "I", "W", "B"):
                found.append(f"{name} on device {device} is no compute action")
            elif not 0 <= stage < schedule.num_stages or schedule.placement.device_of(stage) != device:
                found.append(f"{name} does not belong on device {device}")
            elif microbatch is None or not 0 <= microbatch < schedule.num_microbatches:
                found.append(f"{name} is of no microbatch of the step")
    return found


def _incomplete(schedule: Schedule) -> list[str]:
    count = Counter(node for order in _nodes(schedule) for node in order)
    found = []
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            letters = "".join(letter * count[letter, stage, microbatch] for letter in "FIWB")
            if letters not in ("FB", "FIW"):
                found.append(f"stage {stage} runs {letters or 'nothing'} for microbatch {microbatch}")
    return found


def _graph(schedule: Schedule) -> dict[Node, list[Node]]:
    """For every action of a complete schedule, all that must end before it starts."""
    orders = _nodes(schedule)
    exists = {node for order in orders for node in order}
    last = schedule.num_stages - 1
    before: dict[Node, list[Node]] = {node: [] for node in exists}
    for order in orders:
        for earlier, later in zip(order, order[1:], strict=False):
            before[later].append(earlier)
    for letter, stage, microbatch in exists:
        needed = before[letter, stage, microbatch]
        if letter == "F" and stage > 0:
            needed.append(("F", stage - 1, microbatch))
        if letter in ("I", "B"):
            needed.append(("F", stage, microbatch))
            if stage < last:
                needed.append(("I" if ("I", stage + 1, microbatch) in exists else "B", stage + 1, microbatch))
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
