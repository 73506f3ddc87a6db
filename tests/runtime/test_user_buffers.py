"""Why ``--tp-comm-overlap`` goes with whole backwards only: user buffers are shared by all layers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import toy  # noqa: E402

from megatron_pipemem.runtime.weight_gradients import current_queue  # noqa: E402
from megatron_pipemem.schedule.lowering import lower  # noqa: E402
from megatron_pipemem.schedule.registry import build_schedule  # noqa: E402

MICROBATCHES = 3


class OverUserBuffer(torch.autograd.Function):
    """A linear layer that gathers its input into a buffer of all layers in its backward, as Transformer Engine does.

    A whole backward uses the buffer at once. A split one leaves the buffer to W.
    """

    @staticmethod
    def forward(ctx, input, weight, boxed_weight, buffer, queue):
        ctx.save_for_backward(input)
        ctx.weight, ctx.buffer, ctx.queue = boxed_weight[0], buffer, queue
        return input @ boxed_weight[0].t()

    @staticmethod
    def backward(ctx, grad_output):
        ctx.buffer.copy_(*ctx.saved_tensors)
        grad_weight = None
        if ctx.queue is None:
            grad_weight = grad_output.t() @ ctx.buffer
        else:
            ctx.queue.put(toy.Gemm(ctx.weight, ctx.buffer, grad_output.detach()))
        return grad_output @ ctx.weight, grad_weight, None, None, None


class Layers(torch.nn.Module):
    """The layers of a toy stage; with a buffer, over it."""

    def __init__(self, stage: toy.Stage, buffer: torch.Tensor | None):
        super().__init__()
        self.weights, self.buffer = stage.weights, buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queue = current_queue()
        for weight in self.weights:
            if self.buffer is None:
                x = x @ weight.t()
            else:
                x = OverUserBuffer.apply(x, None if queue is not None else weight, [weight], self.buffer, queue)
            x = torch.tanh(x)
        return x


def gradients(name: str, buffer: torch.Tensor | None) -> list[torch.Tensor]:
    schedule = build_schedule(name, num_devices=1, num_microbatches=MICROBATCHES)
    message = toy.MessageFormat((toy.ROWS, toy.WIDTH), torch.float32, torch.device("cpu"))
    runner = toy.Runner(0, 1)
    runner.stage = Layers(runner.stage, buffer)
    toy.Executor(lower(schedule), 0, {0: runner}, toy.Transport(toy.alone(schedule.placement), message)).run()
    return [weight.grad for weight in runner.stage.weights]


@pytest.mark.parametrize(("name", "is_exact"), [("1f1b", True), ("gpipe", True), ("zb-h1", False)])
def test_only_whole_backwards_are_exact_over_user_buffers(name, is_exact):
    found, expected = gradients(name, torch.empty(toy.ROWS, toy.WIDTH)), gradients("1f1b", None)
    assert all(map(torch.equal, found, expected)) is is_exact
