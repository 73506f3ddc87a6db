"""Splits the backward of Transformer Engine's linear layers with Transformer Engine's own means.

A TE module built with ``delay_wgrad_compute`` keeps ``(input, grad_output)`` in a queue of its own and computes one weight
gradient per call of ``backward_dw()``, in the order of its backwards, and DDP hands it the gradient-ready hook. So the W of a
chunk is one ``backward_dw()`` of each of its TE modules. Megatron refuses the flag for plain pipelines, so it is set after
the configuration has been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_pipemem.mcore.patching import Symbol

LANGUAGE_MODULE = Symbol(
    "megatron.core.models.common.language_module.language_module", "LanguageModule.__init__", ("self", "config")
)
DDP = Symbol(
    "megatron.core.distributed.distributed_data_parallel",
    "DistributedDataParallel.__init__",
    ("self", "config", "ddp_config", "module"),
)

STAYS_DELAYED = (
    "the Transformer Engine modules of this model were built to delay their weight gradients, which nobody but this plugin "
    "asks for: enable() it again before you train the model further, and build models to train without it from a new "
    "configuration (delay_wgrad_compute is set on this one)"
)
"""For whoever takes the plugin off such a model."""


def replacements() -> list[tuple[Symbol, Callable[[Callable], Callable]]]:
    """Make models built from now on with Transformer Engine delay their weight gradients."""
    return [(LANGUAGE_MODULE, _delay_in_model), (DDP, _delay_in_ddp)]


def _delay_in_model(original: Callable) -> Callable:
    def __init__(self, config, *args, **kwargs):
        if getattr(config, "transformer_impl", None) == "transformer_engine":
            config.delay_wgrad_compute = True
        original(self, config, *args, **kwargs)

    return __init__


def _delay_in_ddp(original: Callable) -> Callable:
    def __init__(self, config, ddp_config, module, *args, **kwargs):
        if delayed_modules(module):
            ddp_config.delay_wgrad_compute = True
        original(self, config, ddp_config, module, *args, **kwargs)

    return __init__


def delayed_modules(module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The submodules that wait for ``backward_dw()``, in the module's own order.

    Megatron's attention and MLP have a ``backward_dw`` too that only forwards the call; the modules that really wait are
    those that told DDP not to hook their weights.
    """
    return tuple(
        part
        for part in module.modules()
        if hasattr(part, "backward_dw")
        and any(getattr(weight, "skip_backward_post_hook", False) for weight in part.parameters(recurse=False))
    )


@dataclass(frozen=True)
class DelayedModules:
    """The deferred weight gradients that the TE modules of one chunk keep for one microbatch."""

    modules: tuple[torch.nn.Module, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Transformer Engine does not show what it keeps."""
        return ()

    def run(self) -> None:
        for module in self.modules:
            module.backward_dw()
