"""Run the pairs of a program: its forwards and backwards that run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_pipemem.runtime.executor import Executor, Handler, Handlers, Instruction
from megatron_pipemem.schedule.action import Action, Kind


@dataclass(eq=False)
class Pairs:
    """The step feature that runs both actions of a pair at the place of its forward, for one step on one rank."""

    pairs: frozenset[Action]
    _finishes: dict[Action, Callable[[], None]] = field(default_factory=dict)

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers of F, I and B. That of a pair's backward only runs the rest that ``run_pair`` has left."""
        partners = {
            forward.action: backward
            for forward, backward in pairwise(executor.instructions)
            if forward.action in self.pairs
        }
        run_forward = executor.handlers[Kind.F]

        def forward(each: Instruction) -> None:
            backward = partners.get(each.action)
            if backward is None:
                run_forward(each)
            else:
                self._finishes[backward.action] = executor.run_pair(each, backward)

        def after_pairs(run: Handler) -> Handler:
            def backward(each: Instruction) -> None:
                (self._finishes.pop(each.action, None) or (lambda: run(each)))()

            return backward

        return {Kind.F: forward, **{kind: after_pairs(executor.handlers[kind]) for kind in (Kind.I, Kind.B)}}
