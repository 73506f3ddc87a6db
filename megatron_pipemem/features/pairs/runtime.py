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
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_pipemem.errors import UnsupportedError
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


_ANCHOR = torch.empty(0, requires_grad=True)
"""An input of ``_HandOver`` that needs a gradient and gets none. The tensor that is handed over has lost its graph."""


class _HandOver(torch.autograd.Function):
    """Returns a tensor without the graph that made it, and keeps its gradient. The result is no leaf.

    Autograd would keep a leaf, and with it the tensor's memory, for the whole life of the graph.
    """

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, tensor: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None):
        if gradient is not None:
            ctx.gradients.append(gradient)
        return None, None, None


@dataclass(eq=False)
class _PieceOfForward:
    stream: Any
    ends: list[tuple[GradientEdge, list[torch.Tensor]]] = field(default_factory=list)
    """where the graph of the piece ends, and a list for the gradient of the tensor that it hands over there"""

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> torch.Tensor:
        """Return a tensor of this piece for a later one on ``stream``."""
        tensor.record_stream(stream)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor.detach()
        gradients: list[torch.Tensor] = []
        self.ends.append((get_gradient_edge(tensor), gradients))
        return _HandOver.apply(_ANCHOR, tensor.detach(), gradients)

    def backward(self) -> None:
        reached = [(edge, gradients) for edge, gradients in self.ends if gradients]
        self.ends.clear()
        if any(len(gradients) > 1 for _, gradients in reached):
            raise UnsupportedError(
                "unsupported-model",
                "a layer with experts hands a tensor past its exchanges that is neither the residual nor the output of shared "
                "experts, so its backward has no pieces; drop --overlap-moe-expert-parallel-comm",
            )
        for _, (gradient,) in reached:
            gradient.record_stream(self.stream)
        if reached:
            torch.autograd.backward([edge for edge, _ in reached], [gradient for _, (gradient,) in reached])


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
        self._pieces = [_PieceOfForward(self.computing)]
        self._switched = ExitStack()

    def go_on(self, stream: Any) -> None:
        """End the running piece, and begin the next one on ``stream`` when the running one has ended."""
        self._event.record()
        self._switched.close()
        self._alternate()
        self._event.wait(stream)
        if stream is not self.computing:
            self._switched.enter_context(torch.cuda.stream(stream))
        self._pieces.append(_PieceOfForward(stream))

    def take(self, tensor: torch.Tensor, back: int = 1) -> torch.Tensor:
        """Return a tensor, which was made ``back`` pieces before the running one, for the running one."""
        return self._pieces[-1 - back].hand_over(tensor, self._pieces[-1].stream)

    def end(self, output: torch.Tensor | None) -> None:
        """End the forward. The stream of exchanges, which sends an ``output``, waits for it if it has not made it."""
        self._switched.close()
        if output is not None and not isinstance(output.grad_fn, _HandOver._backward_cls):
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
