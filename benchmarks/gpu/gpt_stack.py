"""A stack of GPT blocks whose linear layers defer their weight gradients, and the loops that the benchmark times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from megatron_pipemem.features.offload.runtime import OffloadEngine
from megatron_pipemem.runtime.weight_gradients import (
    DeferredWeightGradient,
    WeightGradientQueue,
    collecting,
    current_queue,
)


@dataclass(frozen=True)
class Shape:
    """One model size. ``layers`` are those of one stage, ``batch`` sequences make a microbatch."""

    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    layers: int = 2

    def __str__(self) -> str:
        return f"h={self.hidden} s={self.sequence} b={self.batch}"

    @property
    def flops(self) -> int:
        """Of the forward of one layer: products and causal attention, 2 per multiply-add."""
        tokens = self.batch * self.sequence
        return 24 * tokens * self.hidden**2 + 2 * tokens * self.sequence * self.hidden


@dataclass
class _Gemm(DeferredWeightGradient):
    weight: torch.nn.Parameter = field()  # always given, unlike what it inherits
    input: torch.Tensor
    grad_output: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input, self.grad_output

    def run(self) -> None:
        gradient = self.grad_output.flatten(0, -2).t() @ self.input.flatten(0, -2)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad.add_(gradient)


class _SplitLinear(torch.autograd.Function):
    """``activation(x) @ weight.t()``. Keeps ``x`` alone and computes the activation again for the backward."""

    @staticmethod
    def forward(ctx, x, activation, boxed_weight, queue):
        ctx.save_for_backward(x)
        ctx.activation, ctx.weight, ctx.queue = activation, boxed_weight[0], queue
        return F.linear(activation(x), boxed_weight[0])

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            activated = ctx.activation(leaf)
        ctx.queue.put(_Gemm(ctx.weight, activated.detach(), grad_output.detach()))
        gradient = grad_output @ ctx.weight
        if activated is not leaf:
            (gradient,) = torch.autograd.grad(activated, leaf, gradient)
        return gradient, None, None, None


class Block(torch.nn.Module):
    """Attention and MLP without biases, dropout and norm weights.

    With ``recompute`` the outputs of norms and GELU are computed again in the backward: 20 bytes are kept per element of
    the hidden state instead of 32.
    """

    def __init__(self, shape: Shape, recompute: bool):
        super().__init__()
        width = shape.hidden
        self.heads, self.recompute = shape.heads, recompute
        self.qkv, self.proj, self.up, self.down = (
            torch.nn.Parameter(torch.randn(rows, columns) * 0.02)
            for rows, columns in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self._linear(x, _norm, self.qkv).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self._linear(mixed, _same, self.proj)
        up = self._linear(x, _norm, self.up)
        return x + self._linear(up, _gelu, self.down)

    def _linear(self, x: torch.Tensor, activation: Callable, weight: torch.nn.Parameter) -> torch.Tensor:
        if not self.recompute:
            x, activation = activation(x), _same
        return _SplitLinear.apply(x, activation, [weight], current_queue())


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def make_stack(shape: Shape, device: torch.device, recompute: bool, layers: int | None = None) -> torch.nn.Sequential:
    torch.manual_seed(1)
    with device:
        blocks = [Block(shape, recompute) for _ in range(shape.layers if layers is None else layers)]
    return torch.nn.Sequential(*blocks).to(torch.bfloat16)


def make_inputs(shape: Shape, device: torch.device, count: int) -> list[torch.Tensor]:
    size = (shape.batch, shape.sequence, shape.hidden)
    generator = torch.Generator(device).manual_seed(2)
    return [
        torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
        for _ in range(count)
    ]


class Loop:
    """Forwards and backwards of one pipeline rank without its neighbours: ``ahead`` forwards, then one of each in turn.

    Without offload ``ahead`` + 1 microbatches are held. With it every microbatch leaves right after its forward and is called
    back one backward and one forward before it is needed; no more than ``slots`` are on the device, and who needs a slot
    waits for the oldest that is leaving.
    """

    def __init__(self, stack: torch.nn.Module, inputs: list[torch.Tensor], ahead: int, slots: int):
        self.stack, self.inputs, self.ahead, self.slots = stack, inputs, ahead, slots
        self.gradient = torch.ones_like(inputs[0])
        self._outputs: dict[int, torch.Tensor] = {}
        self._queues: dict[int, WeightGradientQueue] = {}

    def run(self, engine: OffloadEngine | None, move: bool = True) -> list[torch.Tensor]:
        """One step. Returns the gradients of the parameters and a checksum of every input's.

        Args:
            engine: offloads; without one, nothing does.
            move: whether the engine moves what it captures, or only counts it.
        """
        self._outputs.clear()
        self._queues.clear()
        self.stack.zero_grad()
        checksums, count = [], len(self.inputs)
        ahead = min(self.ahead, count)
        mover = _Mover(engine, self.slots) if engine is not None and move else None
        for i in range(ahead):
            if mover is not None and i == ahead - 1 and i > 0:
                mover.call_back(0)
            self._forward(i, engine, mover)
        for j in range(count):
            if ahead + j < count:
                self._forward(ahead + j, engine, mover)
            if mover is not None:
                if j + 1 < count:
                    mover.call_back(j + 1)
                mover.use(j)
            self._backward(j)
            gradient = self.inputs[j].grad
            assert gradient is not None, "its backward has run"
            checksums.append(gradient.double().sum())
            self.inputs[j].grad = None
        gradients = (parameter.grad for parameter in self.stack.parameters())
        return [*(each for each in gradients if each is not None), *checksums]

    def _forward(self, i: int, engine: OffloadEngine | None, mover: _Mover | None) -> None:
        if mover is not None:
            mover.make_room()
        self._queues[i] = WeightGradientQueue()
        with collecting(self._queues[i]), nullcontext() if engine is None else engine.capture(i):
            output = self.stack(self.inputs[i])
        # What a pipeline does with an output that has been sent: its graph stays, its memory goes.
        output.data = output.new_empty(1)
        self._outputs[i] = output
        if mover is not None:
            mover.send_away(i, self.inputs[i])

    def _backward(self, j: int) -> None:
        torch.autograd.Variable._execution_engine.run_backward(
            (self._outputs.pop(j),), (self.gradient,), False, False, (), True, True
        )
        self._queues.pop(j).run()


class _Mover:
    """Keeps the number of microbatches on the device."""

    def __init__(self, engine: OffloadEngine, slots: int):
        self._engine, self._slots = engine, slots
        self._here: set[int] = set()
        self._leaving: deque[int] = deque()

    def make_room(self) -> None:
        while len(self._here) + len(self._leaving) >= self._slots and self._leaving:
            self._engine.wait(self._leaving.popleft())

    def send_away(self, i: int, input: torch.Tensor) -> None:
        self._engine.stay(i, [input])
        self._engine.offload(i)
        self._leaving.append(i)

    def call_back(self, j: int) -> None:
        if j in self._leaving:
            self._leaving.remove(j)
        else:
            self.make_room()
        self._engine.reload(j)
        self._here.add(j)

    def use(self, j: int) -> None:
        self._engine.wait(j)
        self._here.remove(j)
