"""Proofs that a program does not deadlock on GPUs: hosts that wait for their device, and two models of single queues.

On a GPU a posted message is a kernel that runs until the other device has posted it too. Some events make a host wait
for its whole device, and so for that message: the loading of a kernel at its first launch, a synchronisation, an
allocation. If the message depends on an action that this host launches later, host and device wait without end.

So the rule for hosts is: no message, collective or sum over replicas may depend on an action that one of its devices
launches after its own post. A message depends on the same actions as its two posts. So the rule compares two positions
for every two posts that complete together: that of the first post, and that of the last action on the same device that
the second post depends on.

In the strict model of single queues an action starts when the previous action of its device has ended. A message, a
collective or a sum over replicas starts when it is the next action of all its devices. Copies to the host take time in
the queue too. No hardware queue is stricter, so a program that ends in this model ends on every GPU.

In the weaker model the launches of a device start in order, and need not end in order. A launch is at the head of the
queue until it may start: a computation until its inputs have come, a post until the computing launched before it has
ended and the post before it on its channel has completed. So a message that waits for the other device holds up the
next message of its channel, and all launches after that one, but no other launch. ``check_starts`` proves both in this
model: that all launches start, and that any one host may wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, permutations

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Graph, Times, Waits, deadlock, find_cycle
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import ActionNodes, Program


class LatestNeeds:
    """Look up the latest node of a lane that must run before a node can end. The graph must be free of deadlock.

    A lookup searches backwards through the waits, and stops at nodes that are less deep than the result can be. Lookups
    with the same two lanes go on where the previous one has ended. They take less time if their nodes come in running
    order, because then no node is searched twice.

    The nodes of a lane are consecutive numbers. ``depths`` are those of the graph's ``Walk``: a node is deeper than all
    nodes that it needs.
    """

    def __init__(self, graph: Graph, depths: Sequence[int]) -> None:
        self._waits, self._lane_of, self._depth = graph.waits, graph.lane_of, depths
        self._first = [lane[0] if lane else 0 for lane in graph.lanes]
        self._searches: dict[tuple[int, int], tuple[int, int, int, dict[int, int]]] = {}

    def after(self, node: int, needed_lane: int, bound: int) -> int:
        """Return the latest node of another lane that ``node`` needs if it comes after ``bound``, else ``bound``.

        ``bound`` is a node of that lane, or the number before its first node.
        """
        lane = self._lane_of[node]
        if bound + 1 >= len(self._lane_of) or self._lane_of[bound + 1] != needed_lane:
            return bound  # the last node of the lane
        floor = self._depth[bound + 1]
        if self._depth[node] <= floor:
            return bound
        before, before_bound, latest, searched = self._searches.get((lane, needed_lane), (-1, -2, -1, {}))
        if node < before or bound < before_bound:
            latest, searched = -1, {}
        latest = max(latest, bound, self._search(node, needed_lane, floor, searched))
        self._searches[lane, needed_lane] = node, bound, latest, searched
        return latest

    def searched(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Return the pairs ``(bound, node)`` for which ``after`` has to search, which are few."""
        depth = [*self._depth, math.inf]
        return ((bound, node) for bound, node in pairs if depth[node] > depth[bound + 1])

    def everywhere(self, nodes: Iterable[int]) -> Iterator[Mapping[int, int]]:
        """Yield by lane the latest nodes that each of these nodes of one lane, in running order, needs."""
        searched: dict[int, int] = {}
        for node in nodes:
            self._search(node, -1, 0, searched)
            yield searched

    def _search(self, node: int, needed_lane: int, floor: int, searched: dict[int, int]) -> int:
        """Return the latest node of a lane among the nodes that ``node`` needs; -1 if the search meets none.

        Nodes that are less deep than ``floor`` are left out, and so are those up to the one in ``searched``, by lane. The
        nodes of this search are added to ``searched``.
        """
        waits, lane_of, depth, latest = self._waits, self._lane_of, self._depth, -1
        tops = [node]
        while tops:
            top = tops.pop()
            lane = lane_of[top]
            end = searched.get(lane, self._first[lane] - 1)
            if top <= end:
                continue
            searched[lane] = top
            for reached in range(top, end, -1):
                if depth[reached] < floor:
                    break
                for needed, _ in waits[reached]:
                    if depth[needed] < floor:
                        continue
                    if lane_of[needed] != needed_lane:
                        tops.append(needed)
                    elif needed > latest:
                        latest = needed
        return latest


def check_host_waits(program: Program, dependencies: Dependencies) -> None:
    """Prove that a program has no deadlock even if a host waits for its whole device before any one of its actions.

    ``dependencies`` has the dependencies of the program. Every send must have its receive, and the program must be free of
    deadlock without such waits. A ScheduleError is raised if the proof fails.
    """
    for end, other, later in refused_waits(program, dependencies):
        raise _fault(dependencies, end, other, later)


def refused_waits(program: Program, dependencies: Dependencies) -> Iterator[tuple[int, int, int]]:
    """Yield ``(post, other, later)``, three nodes, for every post after which a host must not wait for its device.

    ``other`` completes together with ``post``: it is the receive of a send or the reverse, a collective, or another
    device's post of a sum over replicas. It depends on ``later``, an action of the post's own device. The host must
    not wait between ``post`` and ``later``.
    """
    yield from _refused_waits(program, dependencies, LatestNeeds(dependencies.graph, dependencies.walk.depths))


def _refused_waits(
    program: Program, dependencies: Dependencies, latest_needs: LatestNeeds
) -> Iterator[tuple[int, int, int]]:
    graph = dependencies.graph
    nodes, placement = dependencies.nodes, program.placement
    sums = (posts for action, posts in _joint_posts(nodes, placement) if action.kind not in COLLECTIVES)
    meetings = chain(_messages(nodes, placement), sums)
    for end, other in latest_needs.searched(pair for posts in meetings for pair in permutations(posts, 2)):
        later = latest_needs.after(other, graph.lane_of[end], end)
        if later > end:
            yield end, other, later
    collectives = [*chain.from_iterable(dependencies.lanes[dependencies.num_devices :])]
    for collective, latest in zip(collectives, latest_needs.everywhere(collectives), strict=True):
        # The node of a collective needs everything that its posts need.
        for post, _ in graph.waits[collective]:
            if (later := latest[graph.lane_of[post]]) > post:
                yield post, collective, later


def _meetings(nodes: ActionNodes, placement: Placement) -> list[tuple[Action, list[int]]]:
    """Return the posts of every message, collective and sum over replicas: the first action, and a node per device.

    A device with several replicas of a stage takes part in the sum with its last post.
    """
    messages = [(nodes.actions[send], [send, receive]) for send, receive in _messages(nodes, placement)]
    return messages + _joint_posts(nodes, placement)


def _messages(nodes: ActionNodes, placement: Placement) -> list[tuple[int, int]]:
    """Return the nodes of send and receive of every message, in the order of the actions that emit the messages."""
    posts: list[tuple[int, int, int]] = []
    for _, kinds, send, source, receive, destination in Router(placement).routes:
        producers, sends = nodes.of(*kinds, stage=source), nodes.of(send, stage=source)
        receives = nodes.of(receive, stage=destination)
        posts += ((node, sends[unit], receives[unit]) for unit, node in producers.items())
    return [(send, receive) for _, send, receive in sorted(posts)]


def _joint_posts(nodes: ActionNodes, placement: Placement) -> list[tuple[Action, list[int]]]:
    """Return the posts of every collective and sum over replicas: the first action, and a node per device."""
    together: dict[Action, dict[int, int]] = {}
    of_all = (group for (kind, _), group in nodes.groups.items() if kind in COLLECTIVES or kind is Kind.REDUCE_REPLICAS)
    for node in sorted(chain.from_iterable(group.values() for group in of_all)):
        action = nodes.actions[node]
        if action.kind in COLLECTIVES:
            together.setdefault(action._replace(stage=0), {})[action.stage] = node
        else:
            first_action = action._replace(stage=action.stage % placement.model_stages)
            together.setdefault(first_action, {})[placement.devices[action.stage]] = node
    return [(first_action, [*posts.values()]) for first_action, posts in together.items()]


def _fault(dependencies: Dependencies, end: int, other: int, later: int) -> ScheduleError:
    """Return the error for the post ``end``, which completes only after ``later``, a later action of its own device.

    ``other`` is the node with which the post completes (``refused_waits``).
    """
    device = dependencies.graph.lane_of[end]
    first = dependencies.lanes[device].start
    action, after, partner = (dependencies.actions[node] for node in (end, later, other))
    if action.kind in RECEIVES:
        mend = f"post it after {after}"
    else:
        mend = f"post {partner} before the actions that need {after}, or {action} after {after}"
    return ScheduleError(
        "host-wait",
        f"completes only after {after} at position {later - first}, a later action of the same device; the host hangs if it "
        f"synchronizes the device between the two, for example to load a kernel; {mend}, as lower() does",
        at=(device, end - first, action),
    )


@dataclass(frozen=True)
class QueueRun:
    """The simulated run of a program on devices with a single queue; ``spans`` has start and end of every action."""

    program: Program
    spans: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def makespan(self) -> float:
        used = [spans for spans in self.spans if spans]
        return max((spans[-1][1] for spans in used), default=0.0) - min((spans[0][0] for spans in used), default=0.0)

    @cached_property
    def bubble_rate(self) -> float:
        """Return 1 - (work of the busiest device / makespan)."""
        work = [
            sum(end - start for action, (start, end) in zip(actions, spans, strict=True) if action.kind in COMPUTE)
            for actions, spans in zip(self.program.actions, self.spans, strict=True)
        ]
        return 1 - max(work) / self.makespan if self.makespan else 0.0


def run_single_queues(program: Program, costs: Costs | None = None) -> QueueRun:
    """Simulate a program in the strict model of one hardware queue per device, and return the times of its actions.

    Every send must have its receive (``check_posts``).

    Raises:
        ScheduleError: the program has a deadlock in this model.
    """
    prices = ActionPrices(program.schedule, costs or Costs())
    numbers = ActionNodes(program.actions)
    lanes, actions, meetings = numbers.lanes, numbers.actions, _meetings(numbers, program.placement)
    devices = program.placement.devices
    # Meetings follow the actions, each in a lane of its own. A meeting waits until all its devices have done the actions
    # before it in their queues, and the devices wait for the meeting.
    waits: list[Waits] = [()] * len(actions)
    seconds = [prices.of(*action) for action in actions]
    for node, action in enumerate(actions):
        if action in program.schedule.pairs:
            seconds[node + 1] = prices.second_of_pair(action, actions[node + 1])
    meeting_of: dict[int, int] = {}
    firsts = {nodes.start for nodes in lanes}
    for meeting, (first_action, posts) in enumerate(meetings, start=len(actions)):
        waits.append([(post - 1, 0) for post in posts if post not in firsts])
        if first_action.kind is Kind.REDUCE_REPLICAS:
            seconds.append(prices.sums[first_action.stage] if len(posts) > 1 else 0.0)
        elif first_action.kind in COLLECTIVES:
            seconds.append(prices.of(*first_action))
        else:
            source, destination = (devices[actions[post].stage] for post in posts)
            seconds.append(prices.of_message((source, destination), first_action.microbatch))
        for post in posts:
            waits[post], seconds[post], meeting_of[post] = ((meeting, 0),), 0.0, meeting
    graph = Graph([*lanes, *([meeting] for meeting in range(len(actions), len(waits)))], waits, range(len(waits)))
    nodes, reached, _ = graph.walk()
    if len(nodes) < len(waits):

        def awaited(device: int) -> tuple[int, int]:
            """Return another device that has not reached its post, and the position of that post.

            The post is of the same message, collective or sum over replicas as the post at which ``device`` waits.
            """
            _, posts = meetings[meeting_of[lanes[device][reached[device]]] - len(actions)]
            places = ((owner := graph.lane_of[post], post - lanes[owner].start) for post in posts)
            return next((owner, position) for owner, position in places if position != reached[owner])

        cycle = find_cycle(program.actions, reached, awaited)
        raise deadlock(cycle, " where every device has one queue", "lower the schedule for single queues")
    times = Times(graph, seconds, [0.0], 0.0)
    times.run(graph.steps(nodes))
    timed_nodes = (meeting_of.get(node, node) for node in range(len(actions)))
    spans = [(times.starts[node], times.ends[node]) for node in timed_nodes]
    return QueueRun(program, tuple(tuple(spans[nodes.start : nodes.stop]) for nodes in lanes))


def check_starts(program: Program, dependencies: Dependencies) -> None:
    """Prove that a program has no deadlock if every device starts its launches in order, even if any one host waits.

    ``dependencies`` has the dependencies of the program. Sums over data-parallel ranks are left out. These ranks run the
    same program, so they can all run it as one of them does, and reach each sum together.
    """
    graph = _graph_of_starts(program, dependencies)
    _, reached, depths = graph.walk()
    for device, (lane, count) in enumerate(zip(dependencies.lanes[: dependencies.num_devices], reached, strict=False)):
        if count < len(lane):
            raise ScheduleError(
                "queue-order",
                "can never start if its device starts its launches in order: a post before it waits for a message of its "
                "channel that needs a later launch of the device; lower the schedule for single queues",
                at=(device, count, dependencies.actions[lane[count]]),
            )
    for end, other, later in _refused_waits(program, dependencies, LatestNeeds(graph, depths)):
        raise _fault(dependencies, end, other, later)


def _graph_of_starts(program: Program, dependencies: Dependencies) -> Graph:
    """Return the graph of the starts of all launches, where every device starts its launches in order.

    The nodes of ``dependencies`` are the starts, and keep their numbers. A node follows for every message and every sum
    over replicas, in a lane of its own: it completes when all its posts have started.
    """
    devices, collectives = (
        dependencies.lanes[: dependencies.num_devices],
        dependencies.lanes[dependencies.num_devices :],
    )
    lane_of, waits = dependencies.graph.lane_of, [list(of_node) for of_node in dependencies.graph.waits]
    completions = {post: node for node in chain.from_iterable(collectives) for post, _ in waits[node]}
    channels: dict[int, tuple[object, ...]] = {node: () for node in completions.values()}
    for first_action, posts in _meetings(dependencies.nodes, program.placement):
        if first_action.kind not in COLLECTIVES:
            channels[len(waits)] = first_action.kind in SENDS, *(lane_of[post] for post in posts)
            completions |= dict.fromkeys(posts, len(waits))
            waits.append([(post, 0) for post in posts])
    for nodes in devices:
        latest: dict[tuple[object, ...], int] = {}
        for node in nodes:
            waits[node] = [(completions.get(needed, needed), 0) for needed, _ in waits[node]]
            if (completion := completions.get(node)) is not None:
                channel = channels[completion]
                waits[node] += [(latest[channel], 0)] if channel in latest else []
                latest[channel] = completion
    alone = (range(node, node + 1) for node in range(len(dependencies.actions), len(waits)))
    return Graph([*devices, *collectives, *alone], waits)


def check_queues(program: Program, dependencies: Dependencies) -> None:
    """Prove that messages and collectives complete even if every device serves all its posts strictly in order.

    A message moves when it is the next post of both its devices, and a collective when it is the next post of all
    devices. A post waits for its data.
    """
    *devices, channel = dependencies.lanes
    waits = [list(of_node) for of_node in dependencies.graph.waits]
    moves = {post: collective for collective in channel for post, _ in waits[collective]}
    for first_action, posts in _meetings(dependencies.nodes, program.placement):
        if first_action.kind in SENDS:
            moves |= dict.fromkeys(posts, len(waits))
            waits.append([(post, 0) for post in posts])
    for nodes_of_device in devices:
        before = None
        for node in nodes_of_device:
            # An action that needs a send waits until the message has moved.
            waits[node] = [(moves.get(needed, needed), 0) for needed, _ in waits[node]]
            if (move := moves.get(node)) is not None:
                waits[move] += [] if before is None else [(before, 0)]
                before = move
    alone = (range(move, move + 1) for move in range(len(dependencies.actions), len(waits)))
    done = set(Graph([*devices, channel, *alone], waits).walk().nodes)
    for device, nodes_of_device in enumerate(devices):
        for position, node in enumerate(nodes_of_device):
            if node not in done or moves.get(node, node) not in done:
                raise ScheduleError(
                    "queue-order",
                    "can never end if its device serves messages and collectives strictly in posting order; post them "
                    "in the same order on all devices that take part, as lower() does",
                    at=(device, position, dependencies.actions[node]),
                )
