"""Run the pairs of a program: its forwards and backwards that run together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_pipemem.runtime.executor import Executor, Handler, Handlers, Instruction
from megatron_pipemem.schedule.action import Action, Kind


@dataclass(eq=False)
class Pairs:
    """The step feature that runs both actions of a pair at the place of its forward, for one step on one rank."""

    pairs: frozenset[Action]
    exchanging: Callable[[], AbstractContextManager]
    """a context in which messages wait for exchanges alone, and not for the computing stream"""
    _finishes: dict[Action, Callable[[], None]] = field(default_factory=dict)
    _last: Action | None = None
    """the forward of the last pair, until another forward or backward follows it"""

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers of F, I, B and SEND_F.

        That of a pair's backward only runs the rest that ``run_pair`` has left. The output of a pair's forward leaves
        as soon as the last exchange has made it, while the end of the backward is still computed.
        """
        partners = {
            forward.action: backward
            for forward, backward in pairwise(executor.instructions)
            if forward.action in self.pairs
        }
        executor.late_weights = True
        run_forward, run_send = executor.handlers[Kind.F], executor.handlers[Kind.SEND_F]

        def forward(instruction: Instruction) -> None:
            backward = partners.get(instruction.action)
            self._last = None if backward is None else instruction.action
            if backward is None:
                run_forward(instruction)
            else:
                self._finishes[backward.action] = executor.run_pair(instruction, backward)

        def after_pairs(run: Handler) -> Handler:
            def backward(instruction: Instruction) -> None:
                finish = self._finishes.pop(instruction.action, None)
                if finish is None:
                    self._last = None
                    run(instruction)
                else:
                    finish()

            return backward

        def send(instruction: Instruction) -> None:
            # Later exchanges on the same stream would hold the message up.
            is_last = instruction.action._replace(kind=Kind.F) == self._last
            with self.exchanging() if is_last else nullcontext():
                run_send(instruction)

        backwards = {kind: after_pairs(executor.handlers[kind]) for kind in (Kind.I, Kind.B)}
        return {Kind.F: forward, Kind.SEND_F: send, **backwards}
