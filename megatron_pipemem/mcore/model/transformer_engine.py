"""Splits the backward of Transformer Engine's linear layers with Transformer Engine's own means.

A TE module built with ``delay_wgrad_compute`` keeps ``(input, grad_output)`` in a queue of its own and computes one weight
gradient per call of ``backward_dw()``, in the order of its backwards, and DDP hands it the gradient-ready hook. So the W of a
chunk is one ``backward_dw()`` of each of its TE modules. Megatron refuses the flag for plain pipelines, so it is set after
the configuration has been checked.

``backward_dw()`` alone is right only if its microbatch is the one whose backward ran last and DDP keeps the gradients:

* It replaces ``grad`` instead of adding to it, which forgets earlier microbatches where there is no ``main_grad``.
* With fused accumulation it leaves ``grad`` alone, and DDP's hook takes a missing one for an error.
* Before 2.20 it fails on a bias that Megatron adds itself, unless the bias has a ``grad`` already.

So the gradient that a backward leaves in ``grad`` is kept with its microbatch, and put back for its W.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_te_version, is_te_min_version

from megatron_pipemem.mcore.patching import Replacements
from megatron_pipemem.mcore.refusals import check_model
from megatron_pipemem.mcore.symbols import DDP, LANGUAGE_MODULE, TRANSFORMER_ENGINE
from megatron_pipemem.runtime.activation_ledger import data_of, is_quantised
from megatron_pipemem.runtime.weight_gradients import (
    Arriving,
    DeferredWeightGradient,
    ImmediateWeightGradients,
    Shard,
    WeightGradientQueue,
    defers,
    is_early,
    remember,
    shard_of,
)

MARKS_THE_PARAMETER = "2.20.2"

STAYS_DELAYED = (
    "the Transformer Engine modules of this model were built to delay their weight gradients, which only this plugin "
    "asks for: enable() it again before you train the model further, and build models to train without it from a new "
    "configuration (delay_wgrad_compute is set on this one)"
)
"""Logged when the plugin is disabled for such a model."""


def replacements(splits: bool, recomputes: bool) -> Replacements:
    """Return the replacements by which models are checked, and modules of Transformer Engine delay their weight
    gradients.

    Nothing is delayed unless some schedule of the run ``splits`` a backward.
    """

    def build_model(original: Callable, model, config, *args, **kwargs) -> None:
        check_model(config, splits, recomputes)
        if splits and getattr(config, "transformer_impl", None) == "transformer_engine":
            config.delay_wgrad_compute = True
        original(model, config, *args, **kwargs)

    def build_ddp(original: Callable, ddp, config, ddp_config, module, *args, **kwargs) -> None:
        if delayed_modules(module):
            ddp_config.delay_wgrad_compute = True
        original(ddp, config, ddp_config, module, *args, **kwargs)

    checked = [(LANGUAGE_MODULE, build_model)]
    return [*checked, (DDP, build_ddp)] if splits else checked


def delayed_modules(module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the submodules that wait for ``backward_dw()``, in the module's own order.

    Megatron's attention and MLP have a ``backward_dw`` too that only forwards the call; the modules that really wait are
    those that told DDP not to hook their weights. One whose weights are frozen queues nothing.
    """
    return tuple(
        part
        for part in module.modules()
        if hasattr(part, "backward_dw")
        and any("weight" in name and weight.requires_grad for name, weight in _hooked_by_module(part))
    )


def _hooked_by_module(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the module's own parameters, by name, whose gradients are complete after its ``backward_dw()``."""
    for name, parameter in module.named_parameters(recurse=False):
        if getattr(parameter, "skip_backward_post_hook", False):
            yield name, parameter


def uncountable(chunks: list[torch.nn.Module]) -> str | None:
    """Return the reason why hooks must not watch the tensors that these chunks save, or ``None``.

    With fused accumulation a module marks its weight to tell DDP that the gradient is in ``main_grad``. Before
    ``MARKS_THE_PARAMETER`` it marks the weight that it saved. A hook returns another object for it, so DDP would find
    neither mark nor gradient. Modules with delayed weight gradients use ``backward_dw()`` instead.
    """
    if not any(_marks_what_it_saved(part) for chunk in chunks for part in chunk.modules()):
        return None
    if is_te_min_version(MARKS_THE_PARAMETER):
        return None
    return (
        f"Transformer Engine {get_te_version()} with fused gradient accumulation does not bear that its saved tensors are "
        f"watched; install {MARKS_THE_PARAMETER} or newer, or pass --no-gradient-accumulation-fusion"
    )


def _marks_what_it_saved(module: torch.nn.Module) -> bool:
    return getattr(module, "fuse_wgrad_accumulation", False) and not any(_hooked_by_module(module))


_FROZEN_INPUT = "_pipemem_frozen_input"


def notice_frozen_input(module: torch.nn.Module, inputs: tuple) -> None:
    """Run before a delayed module's forward, as a hook: remember whether the input needs no gradient, because all before it is
    frozen. I frees nothing of such a module, so its weight gradient does not wait for W.
    """
    if torch.is_grad_enabled():
        setattr(module, _FROZEN_INPUT, bool(inputs) and not inputs[0].requires_grad)


def defer(modules: tuple[torch.nn.Module, ...], queue: WeightGradientQueue) -> None:
    """Put into ``queue`` the weight gradients that the backward that has just run left to its W, in Transformer Engine and in
    ``grad``. Run those that may not wait.
    """
    at_once = ImmediateWeightGradients()
    for module in modules:
        early = getattr(module, _FROZEN_INPUT, False)
        early = early or any(is_early(weight) for _, weight in _hooked_by_module(module))
        (at_once if early else queue).put(DelayedWeightGradient(module, *_left_by_backward(module)))


@dataclass
class DelayedWeightGradient(DeferredWeightGradient):
    """The weight gradients of one TE module for one microbatch.

    The module computes the oldest that it has. ``gradients`` are those that autograd has found already, above all of
    biases that Megatron adds itself. ``kept`` is the list of tensors that Transformer Engine keeps for this work; some
    may be shards.
    """

    module: Any
    gradients: dict[torch.nn.Parameter, torch.Tensor]
    kept: list
    _arriving: list[tuple[int, Arriving]] = field(default_factory=list)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(parameter for _, parameter in _hooked_by_module(self.module))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*_tensors_in(self.kept), *self.gradients.values())

    def begin(self) -> None:
        self._arriving = [(place, each.begin()) for place, each in enumerate(self.kept) if isinstance(each, Shard)]

    def _make_whole(self) -> None:
        """Replace the shards in Transformer Engine's list by the tensors that ``begin`` has started to gather."""
        while self._arriving:
            place, arriving = self._arriving.pop()
            self.kept[place] = arriving.wait()
            if is_quantised(self.kept[place]):
                self.kept[place].update_usage(columnwise_usage=True)  # as Transformer Engine's backward does

    @torch.no_grad()
    def run(self) -> None:
        earlier: dict[torch.nn.Parameter, torch.Tensor] = {}
        for name, parameter in _hooked_by_module(self.module):
            if parameter in self.gradients:
                parameter.grad = self.gradients[parameter]
            if not _is_computed(self.module, name):
                if parameter.grad is None:
                    parameter.grad = _zero(parameter.dtype, parameter.device).expand(parameter.shape)
            elif parameter.grad is not None:
                earlier[parameter], parameter.grad = parameter.grad, None
        self._make_whole()
        self.module.backward_dw()
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a scalar zero. One made of an 8-bit weight would dequantise the whole weight first."""
    return torch.zeros((), dtype=dtype, device=device)


def _left_by_backward(module: Any) -> tuple[dict[torch.nn.Parameter, torch.Tensor], list]:
    gradients = {}
    for name, parameter in _hooked_by_module(module):
        if parameter.grad is None or not hasattr(parameter, "main_grad"):
            continue
        # A fused backward leaves a dummy in a weight, as large as the weight.
        if not ("weight" in name and module.fuse_wgrad_accumulation):
            gradients[parameter] = parameter.grad
        parameter.grad = None
    queue = module.wgrad_store.context.queue
    if not queue:
        return gradients, []
    # A saved input comes with the graph that computed it, which would keep the stage's input, and its gradient, until W.
    queue[-1][0] = kept = _without_graph(list(queue[-1][0]))
    return gradients, kept


def sharded_replacements(keeps: Callable[[dist.ProcessGroup], bool]) -> Replacements:
    """Return replacements with which modules keep this rank's shard of a gathered tensor until W, which gathers it again.

    ``keeps`` returns whether shards are kept for a tensor-parallel group. Transformer Engine's backward gathers the input
    of a column-parallel layer and the output gradient of a row-parallel one. A shard that was quantised before the gather
    can be kept. A gather that quantises would choose other scaling factors in W, so its whole result is kept.
    """

    def gather(original: Callable, inp: Any, process_group, async_op: bool = False, quantizer: Any = None, **others):
        whole, work = original(inp, process_group, async_op=async_op, quantizer=quantizer, **others)
        known = whole is not inp and not others and (quantizer is None or is_quantised(inp))
        if known and defers() and keeps(process_group):
            usage = () if quantizer is None else (quantizer.rowwise_usage, quantizer.columnwise_usage)

            def gather_again(shard: Any) -> Arriving:
                if usage:
                    quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
                again, arrival = original(shard, process_group, async_op=True, quantizer=quantizer)
                return Arriving(again, arrival, shard)

            remember(whole, Shard(_without_graph(inp), gather_again))
        return whole, work

    def keep(original: Callable, store, tensor_list: list, func: Callable) -> None:
        if defers():
            # Experts have several tensors together, which nothing gathers.
            tensor_list = [each if isinstance(each, (list, tuple)) else shard_of(each) or each for each in tensor_list]
        original(store, tensor_list, func)

    return list(zip(TRANSFORMER_ENGINE, (gather, keep), strict=True)) if get_te_version().release[0] else []


def _is_computed(module: Any, name: str) -> bool:
    """Return whether ``backward_dw()`` sets this parameter's ``grad``: of weights unless it accumulates, of biases that
    it added.
    """
    if "weight" in name:
        return not module.fuse_wgrad_accumulation
    return module.apply_bias and not getattr(module, "gemm_bias_unfused_add", False)


def _without_graph(kept: Any) -> Any:
    if isinstance(kept, (list, tuple)):
        return type(kept)(map(_without_graph, kept))
    return kept.detach() if isinstance(kept, torch.Tensor) and kept.grad_fn is not None else kept


def _tensors_in(kept: Any) -> Iterator[torch.Tensor]:
    if isinstance(kept, (list, tuple)):
        for each in kept:
            yield from _tensors_in(each)
    elif isinstance(kept, Shard):
        yield from data_of(kept.tensor)
    elif isinstance(kept, torch.Tensor) or is_quantised(kept):
        yield from data_of(kept)
