"""Prove that a host may wait for its whole device at any place of its list.

On a GPU a message that has been posted is a kernel that runs until the other end has come. Whatever makes a host wait for its
whole device then waits for that message too: a kernel that is loaded when it is first launched, a synchronisation, an
allocation. If the message needs an action that this host launches later, both wait without end.

So the rule is: no message, collective or sum over replicas needs anything that one of its devices launches after its own post.
Each end stands still until the computation before it has ended. The message thus needs exactly what its own ends need, and
the rule compares, for every two ends, the post of one with the last action of that device that the other one needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import RECEIVES, Kind
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.messages import Message
from megatron_pipemem.schedule.schedule import Program


def last_needed(found: Dependencies) -> list[Sequence[int]]:
    """Return, per node and device, the last node of the device that must run before the node's own device gets past the node.

    The entry of the node's own device is of no use. -1 is no node.

    Args:
        found: dependencies in which all devices come to the ends of their lists.
    """
    graph, num_devices = found.graph, found.num_devices
    waits, lane_of = graph.waits, graph.lane_of
    needed: list[Sequence[int]] = [()] * len(waits)
    current: list[Sequence[int]] = [[-1] * num_devices for _ in graph.lanes]
    for node in found.walk.nodes:
        lane = lane_of[node]
        if waits[node]:
            merged = current[lane]
            for other, _ in waits[node]:
                merged = list(map(max, merged, needed[other]))
                if (source := lane_of[other]) < num_devices:
                    merged[source] = max(merged[source], other)
            current[lane] = merged
        needed[node] = current[lane]
    return needed


def check_host_waits(program: Program, found: Dependencies, messages: Iterable[Message]) -> None:
    """Prove that each host may wait for its device before any of its actions, while all other hosts go on.

    Args:
        program: with matching messages.
        found: its dependencies, in which all devices come to the ends of their lists.
        messages: all of the program.

    Raises:
        ScheduleError: the first post after which a host must not wait.
    """
    for end, other, later in refused_waits(program, found, messages):
        raise _fault(found, end, other, later)


def refused_waits(program: Program, found: Dependencies, messages: Iterable[Message]) -> Iterator[tuple[int, int, int]]:
    """Yield the posts after which a host must not wait for its device.

    Each comes with another post that completes together with it and the later action of its own device that this one needs, all
    by their nodes. The host must not wait after its post and before the later action.

    Args:
        program: with matching messages.
        found: its dependencies, in which all devices come to the ends of their lists.
        messages: all of the program.
    """
    needed, lane_of = last_needed(found), found.graph.lane_of
    for end, other in _pairs(program, found, messages):
        later = needed[other][lane_of[end]]
        if later > end:
            yield end, other, later


def _pairs(program: Program, found: Dependencies, messages: Iterable[Message]) -> Iterator[tuple[int, int]]:
    """Yield every post, by its node, with every other post that completes together with it."""
    nodes = {action: node for node, action in enumerate(found.actions)}
    for message in messages:
        yield from permutations((nodes[message.send], nodes[message.receive]), 2)
    for collectives in found.lanes[found.num_devices :]:
        for collective in collectives:
            # The node of a collective needs the latest of what its posts need.
            yield from ((post, collective) for post, _ in found.graph.waits[collective])
    sums: dict[int, dict[int, int]] = {}
    placement = program.placement
    for action, node in nodes.items():
        if action.kind is Kind.REDUCE_REPLICAS:
            # A device with several replicas of a stage takes part with its last post.
            sums.setdefault(action.stage % placement.model_stages, {})[placement.devices[action.stage]] = node
    for posts in sums.values():
        yield from permutations(posts.values(), 2)


def _fault(found: Dependencies, end: int, other: int, later: int) -> ScheduleError:
    """Return the error of a post that needs a later action of its own device."""
    device = found.graph.lane_of[end]
    first = found.lanes[device].start
    action, after, partner = (found.actions[node] for node in (end, later, other))
    if action.kind in RECEIVES:
        mend = f"post it after {after}"
    else:
        mend = f"post {partner} before what needs {after}, or {action} after {after}"
    return ScheduleError(
        "host-wait",
        f"is complete only after {after} at position {later - first} of its own device; a host that waits for its whole device "
        f"between the two would wait without end, as when a GPU loads a kernel; {mend}, as lower() does",
        at=(device, end - first, action),
    )
