"""Split the backward of Transformer Engine's linear layers by its own option ``delay_wgrad_compute``.

With this option, a module keeps ``(input, grad_output)`` of each backward in a queue. Each call of ``backward_dw()``
computes the oldest weight gradient in the queue, and the module calls DDP's gradient-ready hook. So the W of a chunk is
one ``backward_dw()`` of each of its modules. Megatron refuses the option for plain pipelines, so it is set after the
configuration has been checked.

``backward_dw()`` alone is right only directly after the backward of the same microbatch, and with DDP:

* It replaces ``grad`` instead of adding to it, which loses earlier microbatches if there is no ``main_grad``.
* With fused accumulation it does not set ``grad``, and DDP's hook treats a missing ``grad`` as an error.
* Before 2.20 it fails on a bias that Megatron adds itself, unless the bias has a ``grad`` already.
* In fp8 it does not set the ``grad`` of a bias, which the backward has computed.
* Of a module that ran several times, it reports every gradient to DDP, and not their sum.

So the gradient that a backward leaves in ``grad`` is kept with its microbatch, and put back for its W.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_te_version, is_te_min_version

from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.refusals import OLDEST_SPLITTING, check_model
from megatron_pipemem.mcore.symbols import DDP, LANGUAGE_MODULE, TRANSFORMER_ENGINE, Replacements
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.activation_ledger import data_of, is_quantised
from megatron_pipemem.runtime.weight_gradients import (
    Arriving,
    DeferredWeightGradient,
    ImmediateWeightGradients,
    Shard,
    WeightGradientQueue,
    defers,
    gradient_of,
    is_early,
    is_plain,
    remember,
    shard_of,
)

logger = logging.getLogger(__name__)

MARKS_THE_PARAMETER = "2.20.2"
DEFERS_HEAD = "defer_embedding_wgrad_compute"
"""The setting by which Megatron's head keeps its inputs and output gradients until the stock schedule has ended."""

STAYS_DELAYED = (
    "the Transformer Engine modules of this model were built to delay their weight gradients, which only this plugin "
    "asks for: enable() it again before you train the model further, and build models to train without it from a new "
    "configuration (delay_wgrad_compute is set on this one)"
)
"""Logged when the plugin is disabled for such a model."""

NO_BULK_WGRAD = (
    "tp_comm_bulk_wgrad is off: the reduce-scatter of input gradients would overlap the weight gradient of the same layer, "
    "which is delayed here; the other parts of --tp-comm-overlap are as asked for (--tp-comm-overlap-rs-dgrad overlaps the "
    "same reduce-scatter with the input gradient instead)"
)
"""Logged when a model with user buffers is built to delay its weight gradients."""


def replacements(request: Request) -> Replacements:
    """Return the replacements that check models when they are built, and set ``delay_wgrad_compute`` where needed.

    With pairs, weight gradients run late within whole backwards if the model can do that.
    """
    splits, late = request.may_split, request.pairs

    def build_model(original: Callable, model, config, *args, **kwargs) -> None:
        check_model(config, request)
        if splits and getattr(config, DEFERS_HEAD, False):
            setattr(config, DEFERS_HEAD, False)  # the head, which is built next, would keep its inputs twice
            tell(logger, "%s is off: the schedule itself runs W of the head later", DEFERS_HEAD)
        delays = splits or (late and is_te_min_version(OLDEST_SPLITTING))
        if delays and getattr(config, "transformer_impl", None) == "transformer_engine":
            config.delay_wgrad_compute = True
            if getattr(config, "tp_comm_overlap", False) and config.tp_comm_bulk_wgrad:
                tell(logger, NO_BULK_WGRAD)
                config.tp_comm_bulk_wgrad = False
        original(model, config, *args, **kwargs)

    def build_ddp(original: Callable, ddp, config, ddp_config, module, *args, **kwargs) -> None:
        mark_new_biases(module, config)
        _hook_absorbed_weights(module)
        stop_delaying(module)  # before DDP chooses where it hooks parameters
        if delayed_modules(module):
            ddp_config.delay_wgrad_compute = True
        original(ddp, config, ddp_config, module, *args, **kwargs)

    checked = [(LANGUAGE_MODULE, build_model)]
    return [*checked, (DDP, build_ddp)] if splits or late else checked


def mark_new_biases(module: torch.nn.Module, config: Any) -> None:
    """Mark the biases that Megatron makes anew under ``--use-cpu-initialization``, as Transformer Engine marked the first ones.

    Their gradients come from ``backward_dw()`` as well.
    """
    for part in delayed_modules(module) if config.use_cpu_initialization else ():
        if isinstance(bias := getattr(part, "bias", None), torch.nn.Parameter):
            bias.skip_backward_post_hook = True  # type: ignore[attr-defined]


def _hook_absorbed_weights(module: torch.nn.Module) -> None:
    """Let DDP hook the weights that sparse attention multiplies by, without a forward of their own modules.

    Autograd computes their gradients in I, and ``backward_dw()`` of these modules would find none.
    """
    for part in module.modules():
        if type(part).__name__ == "AbsorbedMLASelfAttention":
            for parameter in cast(Any, part).linear_kv_up_proj.parameters():
                parameter.skip_backward_post_hook = False


def stop_delaying(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Make submodules compute the gradients of weights that are not plain (``is_plain``) within their backward.

    ``backward_dw()`` would give such a gradient to a temporary tensor, or skip the weight's hooks. Return the
    parameters that DDP now has to hook like those of any other module.
    """
    freed = []
    for part in module.modules():
        store = getattr(part, "wgrad_store", None)
        if store is not None and store.delay_wgrad_compute() and not _is_plain(part):
            assert store.context.empty(), "no microbatch waits for W between steps"
            store.disable_delay_wgrad_compute()
            for parameter in part.parameters():
                if getattr(parameter, "skip_backward_post_hook", False):
                    parameter.skip_backward_post_hook = False  # type: ignore[attr-defined]
                    freed.append(parameter)
    return freed


def _is_plain(part: Any) -> bool:
    """Return whether the weights and biases of a module, whose gradients it delays, are plain parameters of its own."""
    if hasattr(part, "num_gemms"):
        kinds = ("weight", "bias") if part.use_bias else ("weight",)
        single = getattr(part, "single_grouped_weight", False)
        names = ["weight"] if single else [f"{kind}{number}" for kind in kinds for number in range(part.num_gemms)]
    else:
        names = [*part.weight_names, *(part.bias_names if part.use_bias else ())]
    parameters = part._parameters
    return all(name in parameters and is_plain(parameters[name]) for name in names)


def delayed_modules(module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the submodules whose weight gradients wait for ``backward_dw()``, in the order of ``modules()``.

    Megatron's attention and MLP have a ``backward_dw()`` too, which only calls others. The modules that compute are
    those that told DDP not to hook their weights. A module whose weights are all frozen is left out.
    """
    return tuple(
        part
        for part in module.modules()
        if any("weight" in name and weight.requires_grad for name, weight in _hooked_by_module(part))
        and hasattr(part, "backward_dw")
    )


def _hooked_by_module(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return name and value of each parameter of this module that ``backward_dw()`` reports to DDP as complete."""
    # Not ``named_parameters``, which takes ten times as long: every I and W asks several times for every module.
    return [
        (name, parameter)
        for name, parameter in module._parameters.items()
        if parameter is not None and getattr(parameter, "skip_backward_post_hook", False)
    ]


def uncountable(chunks: list[torch.nn.Module]) -> str | None:
    """Return the reason why the saved tensors of these chunks must not be counted by hooks; ``None`` if they may.

    With fused accumulation, a module marks its weight to tell DDP that the gradient is in ``main_grad``. Versions
    before ``MARKS_THE_PARAMETER`` mark the saved weight instead of the parameter. A saved-tensor hook returns another
    object for the weight, so DDP would find neither mark nor gradient. Modules with delayed weight gradients are not
    affected. Hooks do not see the tensors that a CUDA graph saves.
    """
    if any(getattr(part, "cuda_graphs", None) for chunk in chunks for part in chunk.modules()):
        return "activations in CUDA graphs cannot be counted; pass --cuda-graph-impl none for a run that counts bytes"
    if not any(_marks_what_it_saved(part) for chunk in chunks for part in chunk.modules()):
        return None
    if is_te_min_version(MARKS_THE_PARAMETER):
        return None
    return (
        f"Transformer Engine {get_te_version()} with fused gradient accumulation fails if its saved tensors are "
        f"counted; install {MARKS_THE_PARAMETER} or newer, or pass --no-gradient-accumulation-fusion"
    )


def _marks_what_it_saved(module: torch.nn.Module) -> bool:
    return getattr(module, "fuse_wgrad_accumulation", False) and not any(_hooked_by_module(module))


_FROZEN_INPUT = "_pipemem_frozen_input"


def notice_frozen_input(module: torch.nn.Module, inputs: tuple) -> None:
    """Note on a module, before its forward, whether its input needs no gradient because all earlier layers are frozen.

    Pass I would free no memory of such a module, so its weight gradient does not wait for W. Nothing is noted without
    grad mode.
    """
    if torch.is_grad_enabled():
        # Not ``setattr``, which torch's modules make slow: every forward comes here.
        module.__dict__[_FROZEN_INPUT] = bool(inputs) and not inputs[0].requires_grad


def defer(modules: tuple[torch.nn.Module, ...], queue: WeightGradientQueue) -> None:
    """Queue the weight gradients that the latest backward has left in these modules, unless they are queued already.

    Those of marked weights (``is_early``), and of modules whose input was frozen, are computed at once. A module that
    ran several times in the forward has left several.
    """
    at_once = WeightGradientQueue()
    latest = {work.module: work for work in queue.pending if isinstance(work, DelayedWeightGradient)}
    for module in modules:
        left = cast(Any, module).wgrad_store.context.queue
        new = [entry for entry in left if not isinstance(entry[0], _Queued)]
        if not new:  # its output got no gradient, like an index without a loss
            continue
        hooked = _hooked_by_module(module)
        early = getattr(module, _FROZEN_INPUT, False) or any(is_early(weight) for _, weight in hooked)
        for entry in new:
            work = DelayedWeightGradient(module, hooked, *_left_by_backward(module, hooked, entry))
            if module in latest:
                latest[module].is_last = False
            latest[module] = work
            (at_once if early or isinstance(queue, ImmediateWeightGradients) else queue).put(work)
    at_once.run()


_REPORT = "wgrad_accumulation_and_reduce_hooks"
"""Attribute of a module: DDP's hooks, which ``backward_dw()`` calls at its end."""


@dataclass
class DelayedWeightGradient(DeferredWeightGradient):
    """The deferred weight gradients of one Transformer Engine module for one microbatch.

    The module computes the oldest in its own queue, so these must run in the order of the backwards. ``hooked`` are the
    parameters that it then reports to DDP, with their names. ``gradients`` are those that autograd has already
    computed, mostly of biases that Megatron adds itself. ``kept`` is the list of tensors that Transformer Engine keeps
    for this work, some of them shards. A module that ran several times in the forward has several works, and reports
    the sum of their gradients to DDP after the last one, as autograd would.
    """

    module: Any
    hooked: list[tuple[str, torch.nn.Parameter]]
    gradients: dict[torch.nn.Parameter, torch.Tensor]
    kept: list
    is_last: bool = True
    _arriving: list[tuple[int, Arriving]] = field(default_factory=list)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(parameter for _, parameter in self.hooked)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*_tensors_in(self.kept), *self.gradients.values())

    def begin(self) -> None:
        self._arriving = [(place, part.begin()) for place, part in enumerate(self.kept) if isinstance(part, Shard)]

    def _make_whole(self) -> None:
        """Replace the shards in Transformer Engine's list by the gathered tensors, when ``begin`` has gathered them."""
        while self._arriving:
            place, arriving = self._arriving.pop()
            self.kept[place] = arriving.wait()
            if is_quantised(self.kept[place]):
                self.kept[place].update_usage(columnwise_usage=True)  # as Transformer Engine's backward does

    def run(self) -> None:
        earlier: dict[torch.nn.Parameter, torch.Tensor] = {}
        for name, parameter in self.hooked:
            if not _is_computed(self.module, name):
                parameter.grad = self.gradients.get(parameter, parameter.grad)
                if parameter.grad is None:
                    parameter.grad = _zero(parameter.dtype, parameter.device).expand(parameter.shape)
            elif parameter in self.gradients and _sums_before_quantising(self.module):
                parameter.grad = self.gradients[parameter]  # which ``backward_dw()`` leaves as it is
            elif parameter in self.gradients:
                # Of another use of the parameter. ``backward_dw()`` would overwrite it.
                gradient_of(parameter).add_(self.gradients[parameter])
            elif parameter.grad is not None:
                earlier[parameter], parameter.grad = parameter.grad, None
        self._make_whole()
        attributes = vars(self.module)
        report = attributes.get(_REPORT, [])
        attributes[_REPORT] = []
        try:
            self.module.backward_dw()
        finally:
            attributes[_REPORT] = report
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        if self.is_last:
            for hook in report:
                hook()


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zero without dimensions. Making it from an 8-bit weight would dequantise the whole weight first."""
    return torch.zeros((), dtype=dtype, device=device)


def _left_by_backward(
    module: Any, hooked: list[tuple[str, torch.nn.Parameter]], entry: list
) -> tuple[dict[torch.nn.Parameter, torch.Tensor], list]:
    gradients = {}
    for name, parameter in hooked:
        if parameter.grad is None or not hasattr(parameter, "main_grad"):
            continue
        # A fused backward leaves a dummy gradient in a weight, and a grouped module one without values, which W computes.
        if not ("weight" in name and (module.fuse_wgrad_accumulation or hasattr(module, "num_gemms"))):
            gradients[parameter] = parameter.grad
        parameter.grad = None
    # A saved input comes with the graph that computed it, which would keep the stage's input, and its gradient, until W.
    entry[0] = kept = _Queued(map(_without_graph, entry[0]))
    return gradients, kept


class _Queued(list):
    """The tensors that Transformer Engine keeps for a weight gradient that is in one of our queues."""


_SHARED = "_pipemem_shared"
"""Attribute of a tensor in a user buffer."""


def _own(kept: Any) -> Any:
    """Return a copy of a tensor in a buffer that later layers overwrite; any other object as it is.

    Such buffers are the user buffers into which Transformer Engine gathers, and Megatron's global ones, in which the allgather
    dispatcher of experts returns a gradient. The copy is made where a weight gradient that is not delayed would read the
    tensor, so it sees the same values.
    """
    if not (hasattr(kept, _SHARED) or _is_in_global_buffer(kept)):
        return kept
    if not is_quantised(kept):
        return kept.clone()
    tensors, emptied = kept.prepare_for_saving()
    emptied.restore_from_saved([tensor if tensor is None else tensor.clone() for tensor in tensors])
    return emptied


def _is_in_global_buffer(kept: Any) -> bool:
    shared = parallel_state._GLOBAL_MEMORY_BUFFER  # ``None`` in programs that bring their own process groups
    buffers = () if shared is None else shared.buffer.values()
    if not buffers or not isinstance(kept, torch.Tensor) or is_quantised(kept):
        return False
    return any(buffer.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr() for buffer in buffers)


def sharded_replacements(keeps: Callable[[dist.ProcessGroup], bool]) -> Replacements:
    """Return the replacements by which Transformer Engine keeps this rank's shard of a gathered tensor, not all of it.

    W gathers the shard again. The result is empty without a Transformer Engine that can delay weight gradients. ``keeps``
    returns whether shards are kept for a tensor-parallel group. Transformer Engine's backward gathers the input of a
    column-parallel layer and the output gradient of a row-parallel layer, with TP overlap into a user buffer. A shard can
    be kept if it was quantised before the gather. A gather that quantises would choose other scaling factors in W, so its
    whole result is kept. Of a whole tensor in a buffer that later layers overwrite, a copy is kept.
    """
    if not is_te_min_version(OLDEST_SPLITTING):  # none, or one that delays no weight gradients here
        return []
    gather_symbol, fill_symbol, put_symbol = TRANSFORMER_ENGINE

    def note_shard(gathered: Any, shard: Any, process_group: dist.ProcessGroup, quantizer: Any) -> None:
        if not (defers() and keeps(process_group)):
            return
        usage = () if quantizer is None else (quantizer.rowwise_usage, quantizer.columnwise_usage)

        def gather_again(shard: Any) -> Arriving:
            if usage:
                quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
            gathers = getattr(*gather_symbol.owner())
            gathered_again, arrival = gathers(shard, process_group, async_op=True, quantizer=quantizer)
            return Arriving(gathered_again, arrival, shard)

        remember(gathered, Shard(_without_graph(shard), gather_again))

    def gather(original: Callable, inp: Any, process_group, async_op: bool = False, quantizer: Any = None, **others):
        gathered, work = original(inp, process_group, async_op=async_op, quantizer=quantizer, **others)
        if gathered is not inp and not others and _is_repeatable(inp, quantizer):
            note_shard(gathered, inp, process_group, quantizer)
        return gathered, work

    def fill(original: Callable, comm: Any, local_tensor: Any, quantizer: Any, process_group):
        gathered, shard = original(comm, local_tensor, quantizer, process_group)
        if gathered is not shard:
            setattr(gathered, _SHARED, True)
            if _is_repeatable(local_tensor, quantizer):
                note_shard(gathered, shard, process_group, quantizer)
        return gathered, shard

    def keep(original: Callable, store, tensor_list: list, func: Callable) -> None:
        # The tensors of experts are lists, and are not gathered.
        kept = [
            tensor if isinstance(tensor, (list, tuple)) else shard_of(tensor) or _own(tensor) for tensor in tensor_list
        ]
        original(store, kept, func)

    return [(gather_symbol, gather), (fill_symbol, fill), (put_symbol, keep)]


def _is_repeatable(shard: Any, quantizer: Any) -> bool:
    """Return whether a gather of a shard does not quantise it, so that another one has the same result."""
    return quantizer is None or is_quantised(shard)


def _is_computed(module: Any, name: str) -> bool:
    """Return whether ``backward_dw()`` sets ``grad`` of this parameter.

    It does for weights without fused accumulation, and for biases that Transformer Engine itself added to the output.
    """
    if "weight" in name:
        return not module.fuse_wgrad_accumulation
    return module.apply_bias and not getattr(module, "gemm_bias_unfused_add", False)


def _sums_before_quantising(module: Any) -> bool:
    """Return whether the backward itself computes the gradient of a module's bias, as it does if it quantises the output's."""
    return module.fp8 and getattr(module.fp8_meta["recipe"], "backward_override", None) is None


def _without_graph(kept: Any) -> Any:
    if isinstance(kept, torch.Tensor):
        return kept if kept.grad_fn is None else kept.detach()
    return type(kept)(map(_without_graph, kept)) if isinstance(kept, (list, tuple)) else kept


def _tensors_in(kept: Any) -> Iterator[torch.Tensor]:
    if isinstance(kept, (list, tuple)):
        for part in kept:
            yield from _tensors_in(part)
    elif isinstance(kept, Shard):
        yield from data_of(kept.tensor)
    elif isinstance(kept, torch.Tensor) or is_quantised(kept):
        yield from data_of(kept)
