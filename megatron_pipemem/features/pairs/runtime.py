"""Run the pairs of a program: its forwards and backwards that run together.

Layers with experts cut a forward into *pieces* that compute or exchange tokens. Each piece has a backward of its own, so
that a forward and a backward of another microbatch can run in turn, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from megatron_pipemem.runtime.executor import Executor, Handler, Handlers, Instruction
from megatron_pipemem.runtime.sections import Section, is_received
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


@dataclass(eq=False)
class _PieceOfForward(Section):
    """A section that computes on ``stream``."""

    stream: Any

    def hand_over_on(self, stream: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this piece for a later one on ``stream``."""
        tensor.record_stream(stream)
        return self.hand_over(tensor)

    def _use(self, gradient: torch.Tensor) -> None:
        gradient.record_stream(self.stream)


_REMEDY = "drop --overlap-moe-expert-parallel-comm"


class Pieces:
    """The pieces of one microbatch's forward on a stage.

        computing   | before |          | experts |         | before | ...   the next layer with experts, or the end
        exchanging           | dispatch |         | combine |

    A layer with experts calls ``go_on`` between pieces, and ``take`` for tensors of earlier pieces.

    Args:
        exchanging: the stream of exchanges. The other one is the stream that is current now.
        run_late: runs the weight gradients that a whole backward has put off so far.
        alternate: called between pieces: it runs the next pieces of another microbatch's backward.
    """

    def __init__(self, exchanging: Any, run_late: Callable[[], None], alternate: Callable[[], None]):
        self.computing, self.exchanging = torch.cuda.current_stream(), exchanging
        self._run_late, self._alternate = run_late, alternate
        self._event = torch.cuda.Event()
        self._pieces = [_PieceOfForward(_REMEDY, self.computing)]
        self._switched = ExitStack()

    def go_on(self, stream: Any) -> None:
        """End the running piece, and begin the next one on ``stream`` when the running one has ended."""
        self._event.record()
        self._switched.close()
        self._alternate()
        self._event.wait(stream)
        if stream is not self.computing:
            self._switched.enter_context(torch.cuda.stream(stream))
        self._pieces.append(_PieceOfForward(_REMEDY, stream))

    def take(self, tensor: torch.Tensor, back: int = 1) -> torch.Tensor:
        """Hand a tensor over to the running piece from the piece that made it, ``back`` pieces before.

        The running piece has an autograd graph of its own, which begins at the result. ``backward`` runs one piece's graph
        after the other, and passes the gradient on between them.
        """
        return self._pieces[-1 - back].hand_over_on(self._pieces[-1].stream, tensor)

    def end(self, output: torch.Tensor | None) -> None:
        """End the forward. The stream of exchanges, which sends an ``output``, waits for it if it has not made it."""
        self._switched.close()
        if output is not None and not is_received(output):
            self._event.record()
            self._event.wait(self.exchanging)

    def backward(self) -> Iterator[None]:
        """Run the backwards of all pieces but the last one, whose backward has run.

        It yields where the forward of another microbatch may run its next piece, and begins with the last exchange.
        """
        pieces = self._pieces[:-1]
        self._event.record()
        while pieces:
            self._run(pieces.pop())
            yield
            self._run(pieces.pop())
            yield
            self._run_late()
            self._run(pieces.pop())
            yield
            yield  # between the other microbatch's experts and the end of its exchange
            self._run(pieces.pop())
            self._run_late()

    def _run(self, piece: _PieceOfForward) -> None:
        self._event.wait(piece.stream)
        with torch.cuda.stream(piece.stream):
            piece.backward()
            self._event.record()
