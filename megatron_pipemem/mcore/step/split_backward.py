"""Split backwards into I and W, in Megatron's own layers and in those of Transformer Engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from megatron_pipemem.mcore.agreement import tell
from megatron_pipemem.mcore.model import transformer_engine
from megatron_pipemem.mcore.model.linear import (
    attach_ddp_hooks,
    countable_linear,
    early_modules,
    mark_early,
    sharded_gradients,
    split_embedding,
    split_linear,
)
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import GATHER_GRADIENT, LINEAR, LOOKUP, Replacements
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.runtime.transport import within_node
from megatron_pipemem.runtime.weight_gradients import EARLY, GRADIENT_READY
from megatron_pipemem.schedule.options import AUTO, GATHERED

logger = logging.getLogger(__name__)


def sharded_replacements(weight_inputs: str) -> Replacements:
    """Return the replacements by which linear layers keep this rank's shard of a gathered tensor until W.

    The tensor is an input or an output gradient, and W gathers it again. ``weight_inputs`` is one of
    ``options.WEIGHT_INPUTS``; for ``gathered`` there are no replacements.
    """
    if weight_inputs == GATHERED:
        return []
    keeps: Callable[[dist.ProcessGroup], bool] = within_node if weight_inputs == AUTO else lambda group: True
    return [(GATHER_GRADIENT, sharded_gradients(keeps)), *transformer_engine.sharded_replacements(keeps)]


class SplitBackward(Extension):
    """Splits the backwards of linear layers for schedules that may split, and replaces them for offload.

    Without a split, weight gradients are computed within the backward. In runs that neither split nor offload, with
    ``counted``, this only makes sure that the ledger can count the bytes that linear layers save.
    ``has_run_delayed`` is true after the first step in which Transformer Engine's modules delayed their weight
    gradients.
    """

    def __init__(self, request: Request, counted: bool):
        self._request = request
        self._counted = counted
        self._prepared: set[torch.nn.Module] = set()
        self._watching: list[RemovableHandle] = []
        self._marked: list[torch.nn.Parameter] = []
        self._hooked: list[torch.nn.Parameter] = []
        self.has_run_delayed = False

    def replacements(self) -> Replacements:
        splits, late = self._request.may_split, self._request.pairs
        replaced = transformer_engine.replacements(splits, late, self._request.may_recompute)
        # Also for offload, because Megatron's linear layers save tensors past the hooks that offload them (``saved_as_is``).
        if splits or late or self._request.may_offload:
            replaced.append((LINEAR, split_linear))
        elif self._counted:
            replaced.append((LINEAR, countable_linear))
        if splits:
            replaced.append((LOOKUP, split_embedding))
            replaced += sharded_replacements(self._request.weight_inputs)
        return replaced

    def prepare(self, step: Step) -> None:
        self._hooked += attach_ddp_hooks(step.chunks)
        new = [chunk for chunk in step.chunks if chunk not in self._prepared]  # not in every step anew
        self._prepared.update(new)
        for module in (each for chunk in new for each in transformer_engine.delayed_modules(chunk)):
            self._watching.append(module.register_forward_pre_hook(transformer_engine.notice_frozen_input))
        self._marked += mark_early(new, early_modules(self._request.early_weights, step.context.config))

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        self.has_run_delayed |= any(stage.delayed for stage in step.stages.values())
        return ()

    def close(self, orderly: bool) -> None:
        for parameter in self._hooked:
            delattr(parameter, GRADIENT_READY)
        self._hooked.clear()
        self._prepared.clear()
        for hook in self._watching:
            hook.remove()
        self._watching.clear()
        for weight in self._marked:
            delattr(weight, EARLY)
        self._marked.clear()
        if self.has_run_delayed:
            tell(logger, transformer_engine.STAYS_DELAYED, level=logging.WARNING)
