"""Run a program on devices that serve everything, or all messages and collectives, in one queue.

The model of one queue for everything is strict: an action starts when the one before it on its device has ended, and what
several devices do together, a message, a collective or a sum over replicas, starts when all of them have come to it. Transfers
to the host take their time in the queue too. No hardware queue is stricter, so what ends here ends on any.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COLLECTIVES, COMPUTE, Action, Kind
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.walk import Graph, Times, Waits, deadlock, find_cycle, numbered


@dataclass(frozen=True)
class QueueRun:
    """Say how a program ran."""

    program: Program
    spans: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def makespan(self) -> float:
        used = [spans for spans in self.spans if spans]
        return max((spans[-1][1] for spans in used), default=0.0) - min((spans[0][0] for spans in used), default=0.0)

    @cached_property
    def bubble_rate(self) -> float:
        """1 - work of the busiest device / makespan."""
        work = [
            sum(end - start for action, (start, end) in zip(actions, spans, strict=True) if action.kind in COMPUTE)
            for actions, spans in zip(self.program.actions, self.spans, strict=True)
        ]
        return 1 - max(work) / self.makespan if self.makespan else 0.0


def run_single_queues(program: Program, costs: Costs | None = None) -> QueueRun:
    """Run a program whose messages match.

    Args:
        program: see ``lower``, which makes those that end here if it is asked to.
        costs: what it costs; unit costs by default.

    Raises:
        ScheduleError: some queues wait for one another for ever; the message names them in a circle.
        CostsError: the costs do not fit the placement.
    """
    prices = ActionPrices(program.schedule, costs or Costs())
    lanes, actions = numbered(program.actions), [action for order in program.actions for action in order]
    meetings = _meetings(program, prices)
    # Behind the actions stand the meetings, each in a lane of its own. Those who take part wait for it, and it waits until all
    # of them have done what is before it in their queues.
    waits: list[Waits] = [()] * len(actions)
    seconds = [prices.of(*action) for action in actions]
    meeting_of: dict[int, int] = {}
    firsts = {nodes.start for nodes in lanes}
    for meeting, (posts, takes) in enumerate(meetings, start=len(actions)):
        waits.append([(post - 1, 0) for post in posts if post not in firsts])
        seconds.append(takes)
        for post in posts:
            waits[post], seconds[post], meeting_of[post] = ((meeting, 0),), 0.0, meeting
    graph = Graph([*lanes, *([meeting] for meeting in range(len(actions), len(waits)))], waits, range(len(waits)))
    nodes, reached = graph.walk()
    if len(nodes) < len(waits):

        def awaited(device: int) -> tuple[int, int]:
            """Whom a device waits for, and what that one has not come to."""
            posts, _ = meetings[meeting_of[lanes[device][reached[device]]] - len(actions)]
            places = ((owner := graph.lane_of[post], post - lanes[owner].start) for post in posts)
            return next((owner, position) for owner, position in places if position != reached[owner])

        cycle = find_cycle(program.actions, reached, awaited)
        raise deadlock(cycle, " where every device has one queue", "lower the schedule for single queues")
    times = Times(graph, seconds, [0.0], 0.0)
    times.run(graph.steps(nodes))
    spans = [
        (times.starts[each], times.ends[each]) for each in (meeting_of.get(node, node) for node in range(len(actions)))
    ]
    return QueueRun(program, tuple(tuple(spans[nodes.start : nodes.stop]) for nodes in lanes))


def _meetings(program: Program, prices: ActionPrices) -> list[tuple[list[int], float]]:
    """Whatever several devices do together: the nodes of the actions that take part, and how long it takes."""
    router, placement = Router(program.placement), program.placement
    nodes = {action: node for node, action in enumerate(action for order in program.actions for action in order)}
    together: dict[tuple[Kind, int] | Action, tuple[list[int], float]] = {}
    for message in filter(None, map(router.emitted, nodes)):
        posts = [nodes[message.send], nodes[message.receive]]
        together[message.send] = posts, prices.of_message(message.edge, message.send.microbatch)
    sums: dict[int, dict[int, int]] = {}
    for action, node in nodes.items():
        if action.kind in COLLECTIVES:
            key = (action.kind, action.microbatch)
            together.setdefault(key, ([], prices.of(*action)))[0].append(node)
        elif action.kind is Kind.REDUCE_REPLICAS:
            # Of a device that holds several replicas of a stage, the last post is the one that counts.
            stage = action.stage % placement.model_stages
            sums.setdefault(stage, {})[placement.devices[action.stage]] = node
    for stage, last in sums.items():
        together[Kind.REDUCE_REPLICAS, stage] = [*last.values()], prices.sums[stage] if len(last) > 1 else 0.0
    return [*together.values()]


def check_queues(program: Program, found: Dependencies) -> None:
    """Prove that messages and collectives do not hang, however strictly a device serves its queue of whatever it posts: a
    message moves when it is at the head of both ends' queues, a collective when it is at the head of all, and nothing
    behind a head moves. A post waits for the data it brings.

    Args:
        program: with matching messages.
        found: its dependencies, in which all devices come to their ends.

    Raises:
        ScheduleError: some device waits for ever.
    """
    router, nodes = Router(program.placement), {action: node for node, action in enumerate(found.actions)}
    *devices, channel = found.lanes
    waits = [list(each) for each in found.graph.waits]
    moves = {post: collective for collective in channel for post, _ in waits[collective]}
    for message in filter(None, map(router.emitted, found.actions)):
        ends = [nodes[message.send], nodes[message.receive]]
        moves |= dict.fromkeys(ends, len(waits))
        waits.append([(end, 0) for end in ends])
    for nodes_of_device in devices:
        before = None
        for node in nodes_of_device:
            # Who waits for a message to be sent waits until it has moved.
            waits[node] = [(moves.get(needed, needed), 0) for needed, _ in waits[node]]
            if (move := moves.get(node)) is not None:
                waits[move] += [] if before is None else [(before, 0)]
                before = move
    alone = (range(move, move + 1) for move in range(len(found.actions), len(waits)))
    done = set(Graph([*devices, channel, *alone], waits).walk().nodes)
    for device, nodes_of_device in enumerate(devices):
        for position, node in enumerate(nodes_of_device):
            if node not in done or moves.get(node, node) not in done:
                raise ScheduleError(
                    "queue-order",
                    "never gets through where a device serves its messages and collectives strictly in posting order; post "
                    "them in one order on all devices that take part, as lower() does",
                    at=(device, position, found.actions[node]),
                )
