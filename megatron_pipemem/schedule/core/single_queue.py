"""What becomes of a program on devices that serve everything in one queue: proof that it ends, and how long it takes.

The model is strict: an action starts when the one before it on its device has ended, and what several devices do together, a
message, a collective or a sum over copies, starts when all of them have come to it. Copies to the host take their time in the
queue too. No hardware queue is stricter, so what ends here ends on any.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import COLLECTIVES, COMPUTE, Action, Kind
from megatron_pipemem.schedule.core.action_prices import ActionPrices
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Program
from megatron_pipemem.schedule.lowering.messages import Message, Router


@dataclass(frozen=True)
class QueueRun:
    """How a program ran. ``spans``: start and end of every action of every device, in seconds."""

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
    return _Queues(program, ActionPrices(program.schedule, costs or Costs())).run()


class _Queues:
    def __init__(self, program: Program, prices: ActionPrices) -> None:
        self._program, self._prices = program, prices
        self._at = [0] * len(program.actions)
        self._spans: list[list[tuple[float, float]]] = [[] for _ in program.actions]
        router = Router(program.placement)
        self._messages: dict[Action, Message] = {}
        for actions in program.actions:
            for action in actions:
                if message := router.emitted(action):
                    self._messages[message.send] = self._messages[message.receive] = message
        self._places = {
            action: (device, position)
            for device, actions in enumerate(program.actions)
            for position, action in enumerate(actions)
        }
        # Of a device that holds several replicas of a stage, the last post is the one that counts.
        self._sums: dict[int, dict[int, Action]] = {}
        for device, actions in enumerate(program.actions):
            for action in actions:
                if action.kind is Kind.REDUCE_REPLICAS:
                    self._sums.setdefault(action.stage % program.placement.model_stages, {})[device] = action

    def run(self) -> QueueRun:
        pending = list(range(len(self._at)))
        while pending:
            device = pending.pop()
            while (action := self._head(device)) is not None:
                together, seconds = self._meeting(device, action)
                if any(self._head(other) != post for other, post in together):
                    break
                start = max((self._spans[other][-1][1] for other, _ in together if self._spans[other]), default=0.0)
                for other, _ in together:
                    self._spans[other].append((start, start + seconds))
                    self._at[other] += 1
                pending += [other for other, _ in together if other != device]
        if any(self._head(device) is not None for device in range(len(self._at))):
            raise self._deadlock()
        return QueueRun(self._program, tuple(map(tuple, self._spans)))

    def _head(self, device: int) -> Action | None:
        actions = self._program.actions[device]
        return actions[self._at[device]] if self._at[device] < len(actions) else None

    def _meeting(self, device: int, action: Action) -> tuple[list[tuple[int, Action]], float]:
        """Who takes part in an action, with what, and how long it takes."""
        if message := self._messages.get(action):
            ends = zip(message.edge, (message.send, message.receive), strict=True)
            return list(ends), self._prices.of_message(message.edge)
        if action.kind in COLLECTIVES:
            posts = [(other, action._replace(stage=other)) for other in range(len(self._at))]
            return posts, self._prices.of_action(device, action)
        if action.kind is Kind.REDUCE_REPLICAS:
            stage = action.stage % self._program.placement.model_stages
            if self._sums[stage][device] == action:
                several = len(self._sums[stage]) > 1
                return sorted(self._sums[stage].items()), self._prices.of_sum(stage) if several else 0.0
            return [(device, action)], 0.0
        return [(device, action)], self._prices.of_action(device, action)

    def _deadlock(self) -> ScheduleError:
        """Every device that has not ended waits for one other: following them from any comes round to a circle."""
        path: list[int] = []
        device = next(device for device in range(len(self._at)) if self._head(device) is not None)
        while device not in path:
            path.append(device)
            device = self._awaited(device)[0]
        cycle = path[path.index(device) :]
        steps = []
        for member in cycle:
            other, post = self._awaited(member)
            _, position = self._places[post]
            steps.append(
                f"{self._head(member)} (device {member}, position {self._at[member]}) waits for {post} (device {other}, "
                f"position {position}), which comes after {self._head(other)}"
            )
        return ScheduleError(
            f"deadlock where every device has one queue: {'; '.join(steps)}; lower the schedule for single queues",
            device=cycle[0],
            position=self._at[cycle[0]],
            action=self._head(cycle[0]),
        )

    def _awaited(self, device: int) -> tuple[int, Action]:
        """Whom a device waits for, and what that one has not come to."""
        together, _ = self._meeting(device, self._head(device))
        return next((other, post) for other, post in together if self._head(other) != post)
