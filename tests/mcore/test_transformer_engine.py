"""The contract with Transformer Engine's delayed weight gradients, against a stand-in that keeps it.

Transformer Engine needs a GPU. Its contract, as Megatron-Core's wrappers use it: a module built with
``config.delay_wgrad_compute`` marks its weights ``skip_backward_post_hook``, queues one weight gradient per backward,
and computes the oldest per ``backward_dw()``, calling the hooks that DDP registered.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_pipemem.mcore import transformer_engine  # noqa: E402
from megatron_pipemem.mcore.transformer_engine import DelayedModules, delayed_modules  # noqa: E402
from megatron_pipemem.runtime.weight_gradients import WeightGradientQueue  # noqa: E402


class DelayedLinear(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))
        self.queue, self.hooks = deque(), []
        if config.delay_wgrad_compute:
            self.weight.skip_backward_post_hook = True

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        self.hooks.append(hook)

    def forward(self, x):
        return _Delayed.apply(x, self)

    def backward_dw(self):
        x, grad_output = self.queue.popleft()
        gradient = grad_output.t() @ x
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        for hook in self.hooks:
            hook()


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        ctx.module.queue.append((ctx.saved_tensors[0], grad_output))
        return grad_output @ ctx.module.weight, None


class Mlp(torch.nn.Module):
    """As Megatron's: has a ``backward_dw`` of its own that only forwards the call."""

    def __init__(self, config):
        super().__init__()
        self.fc1, self.fc2 = DelayedLinear(config), DelayedLinear(config)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))

    def backward_dw(self):
        raise AssertionError("would compute the linear layers' gradients twice")


def delayed_model():
    config = SimpleNamespace(transformer_impl="transformer_engine", delay_wgrad_compute=False)
    built = {}

    def original(self, config):
        built["delay"] = config.delay_wgrad_compute
        self.mlp = Mlp(config)

    model = torch.nn.Module()
    transformer_engine._delay_in_model(original)(model, config)
    return model, config, built


def test_models_built_with_transformer_engine_delay_their_weight_gradients():
    _, config, built = delayed_model()
    assert built["delay"] is True and config.delay_wgrad_compute is True
    local = SimpleNamespace(transformer_impl="local", delay_wgrad_compute=False)
    transformer_engine._delay_in_model(lambda self, config: None)(None, local)
    assert local.delay_wgrad_compute is False


def test_ddp_is_told_only_when_some_module_delays():
    def told(module):
        ddp_config = SimpleNamespace(delay_wgrad_compute=False)
        transformer_engine._delay_in_ddp(lambda self, config, ddp_config, module: None)(None, None, ddp_config, module)
        return ddp_config.delay_wgrad_compute

    assert told(delayed_model()[0]) is True
    assert told(torch.nn.Linear(2, 2)) is False


def test_only_the_modules_that_really_wait_are_found():
    model, _, _ = delayed_model()
    assert delayed_modules(model) == (model.mlp.fc1, model.mlp.fc2)
    assert delayed_modules(torch.nn.Linear(2, 2)) == ()


def test_w_computes_the_oldest_microbatch_and_then_calls_the_hooks():
    model, _, _ = delayed_model()
    events = []
    for linear in (model.mlp.fc1, model.mlp.fc2):
        linear.register_wgrad_accumulation_and_reduce_hooks(lambda linear=linear: events.append(linear))
    batches = [torch.randn(2, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    queues = []
    for batch in batches:
        model.mlp(batch.requires_grad_()).square().sum().backward()
        queues.append(WeightGradientQueue())
        queues[-1].put(DelayedModules(delayed_modules(model)))
    assert model.mlp.fc1.weight.grad is None and events == []
    for done, queue in enumerate(queues, start=1):
        queue.run()
        assert len(events) == 2 * done
        reference = Mlp(SimpleNamespace(delay_wgrad_compute=False))
        total = torch.zeros(3, 3)
        for batch in batches[:done]:
            weight1, weight2 = (torch.eye(3).requires_grad_() for _ in range(2))
            y = torch.tanh(batch @ weight1.t()) @ weight2.t()
            y.square().sum().backward()
            total += weight1.grad
        torch.testing.assert_close(model.mlp.fc1.weight.grad, total)
        assert not delayed_modules(reference)
