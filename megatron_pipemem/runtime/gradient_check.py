"""Find parameters that lose their gradient, because neither autograd nor a W computes it.

A split layer hides its weight from autograd, or returns no gradient for it. So a mistake there, or a new kind of weight,
would show only in the losses. In one step, this check compares autograd's graphs with the gradients that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from megatron_pipemem.runtime.weight_gradients import accumulator_of, completing


def reached(roots: Iterable[torch.Tensor], modules: tuple[str, ...]) -> Iterator[torch.Tensor]:
    """Yield the parameters to which a whole backward from these tensors would give a gradient.

    The node of a split layer has the weights whose gradients wait for W in its attribute ``deferred``. The inputs of
    other autograd functions are left out, because a function need not return a gradient for them. ``modules``
    are beginnings of the names of modules whose functions do return one, or leave it to W.
    """
    nodes: list[Any] = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith(modules):
            continue
        yield from getattr(node, "deferred", ())
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                yield following.variable
            elif following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


class GradientCheck:
    """Compares the parameters that autograd's graphs reach with those that get a gradient, in a ``with`` block.

    ``parameters`` are the trained parameters of a rank, by name. For ``modules`` see ``reached``.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], modules: tuple[str, ...]):
        self._parameters, self._modules = parameters, modules
        self._reached: set[torch.Tensor] = set()
        self._complete: set[torch.Tensor] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note within a ``with`` block which parameters are reached, and which get a gradient."""
        with ExitStack() as stack:
            nodes = [(parameter, accumulator_of(parameter)) for parameter in self._parameters.values()]
            for parameter, node in nodes:
                stack.callback(node.register_prehook(partial(self._arrives, parameter)).remove)
            stack.enter_context(completing(self._complete.update))
            # All of Megatron's, Transformer Engine's and torch's backwards end in this function, recomputed ones too.
            holder: Any = Variable
            stack.callback(setattr, holder, "_execution_engine", holder._execution_engine)
            holder._execution_engine = _Engine(holder._execution_engine, self._note)
            yield

    def _note(self, roots: Iterable[torch.Tensor]) -> None:
        # Other leaves are activations, which must not be kept.
        self._reached.update({*self._parameters.values()}.intersection(reached(roots, self._modules)))

    def _arrives(self, parameter: torch.Tensor, gradients: tuple) -> None:
        if gradients[0] is not None:
            self._complete.add(parameter)

    def lost(self) -> list[str]:
        """Return the names of parameters that were reached and got no gradient."""
        lost = self._reached - self._complete
        return [name for name, weight in self._parameters.items() if weight in lost and not _has_gradient(weight)]


def _has_gradient(parameter: Any) -> bool:
    """Return whether a parameter has a gradient. Kernels may add it to ``main_grad`` themselves."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad is not None or (main is not None and bool(main.any()))


class _Engine:
    """Autograd's engine, which passes the roots of its backwards to ``note``."""

    def __init__(self, engine: Any, note: Callable[[Iterable[torch.Tensor]], None]):
        self._engine, self._note = engine, note

    def run_backward(self, tensors, *arguments, **named):
        if named.get("accumulate_grad", True):
            self._note(tensors)
        return self._engine.run_backward(tensors, *arguments, **named)

    def __getattr__(self, name: str):
        return getattr(self._engine, name)
