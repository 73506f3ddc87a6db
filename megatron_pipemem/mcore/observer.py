"""Watches Megatron's own schedules, so that a stock run is measured by the same ledger and clock as ours."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pipemem.mcore.patching import Symbol
from megatron_pipemem.mcore.run_record import RunRecord, StepRecord
from megatron_pipemem.mcore.stages import tensors_in, watch_batches
from megatron_pipemem.mcore.step import BACKWARD_STEP, FORWARD_STEP, WITH_INTERLEAVING, WITHOUT_INTERLEAVING, observe
from megatron_pipemem.schedule.action import Action, Kind


def replacements(record: RunRecord | None) -> list[tuple[Symbol, Callable[[Callable], Callable]]]:
    """What to rebind to fill ``record``; nothing without one. Stock's results are passed through untouched."""
    if record is None:
        return []
    observer = _Observer(record)
    return [
        (WITH_INTERLEAVING, observer.wrap_schedule),
        (WITHOUT_INTERLEAVING, observer.wrap_schedule),
        (FORWARD_STEP, observer.wrap_forward),
        (BACKWARD_STEP, observer.wrap_backward),
    ]


class _Observer:
    def __init__(self, record: RunRecord):
        self._record = record
        self._observed: StepRecord | None = None

    def wrap_schedule(self, original: Callable) -> Callable:
        def forward_backward(*, model, data_iterator, forward_only: bool = False, **kwargs):
            if forward_only:
                return original(model=model, data_iterator=data_iterator, forward_only=True, **kwargs)
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.barrier(group=group)
            self._observed = observed = observe(model if isinstance(model, list) else [model])
            try:
                result = original(
                    model=model, data_iterator=watch_batches(data_iterator, observed.ledger), **kwargs
                )
            finally:
                self._observed = None
            self._record.add_step("stock", None, group.rank(), group, observed)
            return result

        return forward_backward

    def wrap_forward(self, original: Callable) -> Callable:
        def forward_step(
            forward_step_func, data_iterator, model, num_microbatches, input_tensor, *args, **kwargs
        ):
            call = (forward_step_func, data_iterator, model, num_microbatches, input_tensor, *args)
            if self._observed is None:
                return original(*call, **kwargs)
            action = Action(Kind.F, kwargs.get("vp_stage") or 0, kwargs.get("current_microbatch") or 0)
            self._hold_boundary(input_tensor)
            with self._observed.trace.measure(action), self._observed.ledger.watch_saved():
                result = original(*call, **kwargs)
            self._observed.ledger.record(action)
            return result

        return forward_step

    def wrap_backward(self, original: Callable) -> Callable:
        def backward_step(input_tensor, output_tensor, output_tensor_grad, config):
            if self._observed is None:
                return original(input_tensor, output_tensor, output_tensor_grad, config)
            action = Action(Kind.B, 0, 0)
            self._hold_boundary(output_tensor_grad)
            with self._observed.trace.measure(action):
                result = original(input_tensor, output_tensor, output_tensor_grad, config)
            self._observed.ledger.record(action)
            return result

        return backward_step

    def _hold_boundary(self, tensors) -> None:
        for tensor in tensors_in(tensors):
            self._observed.ledger.hold(tensor, "boundary")
