"""Cut the autograd graph of a forward into sections, each with a backward of its own.

A section hands a tensor over to a later one without the graph that made it. The gradient of the tensor waits in a list
until the backward of its section begins there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megatron_pipemem.errors import UnsupportedError

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


def received(tensor: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor as the input of a section, whose gradient goes into ``gradients``."""
    return _HandOver.apply(_ANCHOR, tensor.detach(), gradients)


def is_received(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the unchanged input of a section."""
    return isinstance(tensor.grad_fn, _HandOver._backward_cls)


def leaves_of(nodes: Iterable[Node]) -> set[torch.Tensor]:
    """Return the tensors to whose gradients a backward may add that begins at nodes of autograd's graph."""
    seen = {*nodes}
    waiting = [*seen]
    while waiting:
        new = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= new
        waiting += new
    return {node.variable for node in seen if hasattr(node, "variable")}


@dataclass(eq=False)
class Section:
    """A part of a forward with an autograd graph of its own. ``remedy`` ends the message of a refused model."""

    remedy: str
    ends: list[tuple[GradientEdge, list[torch.Tensor]]] = field(default_factory=list, init=False)
    """where the graph of the section ends, and a list for the gradient of the tensor that it hands over there"""

    def end_at(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Let the backward begin at a tensor of this section, with the gradient that will be in the returned list."""
        gradients: list[torch.Tensor] = []
        self.ends.append((get_gradient_edge(tensor), gradients))
        return gradients

    @property
    def leaves(self) -> set[torch.Tensor]:
        """The tensors to which the graph leads from its ends, such as parameters."""
        return leaves_of([edge.node for edge, _ in self.ends])

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this section for a later one."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor.detach()
        return received(tensor, self.end_at(tensor))

    def backward(self) -> None:
        """Run autograd from all ends that have a gradient. Raise an UnsupportedError if an end has several."""
        reached = [(edge, gradients) for edge, gradients in self.ends if gradients]
        self.ends.clear()
        if any(len(gradients) > 1 for _, gradients in reached):
            raise UnsupportedError(
                "unsupported-model",
                "a layer with experts hands a tensor past its exchanges that is neither the residual nor the output of shared "
                f"experts, so its backward cannot be cut there; {self.remedy}",
            )
        for _, (gradient,) in reached:
            self._use(gradient)
        if reached:
            torch.autograd.backward([edge for edge, _ in reached], [gradient for _, (gradient,) in reached])

    def _use(self, gradient: torch.Tensor) -> None:
        """Prepare a gradient of another section for the backward of this one."""
