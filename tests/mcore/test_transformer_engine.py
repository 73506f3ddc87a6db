"""How a model comes to delay its weight gradients, and what is refused. That they are right: ``tests/transformer_engine``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_pipemem.mcore import transformer_engine  # noqa: E402
from megatron_pipemem.mcore.transformer_engine import delayed_modules  # noqa: E402


def waiting(requires_grad: bool = True) -> torch.nn.Linear:
    """As a Transformer Engine module that delays shows itself."""
    linear = torch.nn.Linear(2, 2)
    linear.weight.skip_backward_post_hook = True
    linear.weight.requires_grad = requires_grad
    linear.backward_dw = lambda: None
    return linear


def test_models_built_with_transformer_engine_delay_their_weight_gradients():
    def delay_of(transformer_impl):
        config = SimpleNamespace(transformer_impl=transformer_impl, delay_wgrad_compute=False)
        seen = []
        build = transformer_engine._delay_in_model(lambda self, config: seen.append(config.delay_wgrad_compute))
        build(None, config)
        assert seen == [config.delay_wgrad_compute]
        return config.delay_wgrad_compute

    assert delay_of("transformer_engine") is True
    assert delay_of("local") is False


def test_ddp_is_told_only_when_some_module_delays():
    def told(module):
        ddp_config = SimpleNamespace(delay_wgrad_compute=False)
        transformer_engine._delay_in_ddp(lambda self, config, ddp_config, module: None)(None, None, ddp_config, module)
        return ddp_config.delay_wgrad_compute

    assert told(waiting()) is True
    assert told(torch.nn.Linear(2, 2)) is False


def test_only_the_modules_that_really_wait_are_found():
    forwarding = torch.nn.Sequential(waiting(), torch.nn.Tanh(), waiting(requires_grad=False))
    forwarding.backward_dw = lambda: None
    assert delayed_modules(forwarding) == (forwarding[0],)
    assert delayed_modules(torch.nn.Linear(2, 2)) == ()
