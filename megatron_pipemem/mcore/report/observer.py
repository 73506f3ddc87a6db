"""Watches Megatron's own schedules, so that a stock run is measured by the same ledger and clock as ours.

Megatron's loops run what our ``1f1b`` and ``interleaved`` plan, action by action, so a stock run has a plan too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Choice, Knowledge, Shape
from megatron_pipemem.conflicts import requested
from megatron_pipemem.mcore.model.linear import countable_linear
from megatron_pipemem.mcore.model.stages import tensors_in, watch_batches
from megatron_pipemem.mcore.model.weight_memory import count_weights
from megatron_pipemem.mcore.patching import Feature, Replacements
from megatron_pipemem.mcore.programs import announce
from megatron_pipemem.mcore.report.run_record import STEPS, RunRecord
from megatron_pipemem.mcore.report.step_record import count_layers
from megatron_pipemem.mcore.step.observation import Observation, observe
from megatron_pipemem.mcore.symbols import BACKWARD_STEP, FORWARD_STEP, LINEAR, WITH_INTERLEAVING, WITHOUT_INTERLEAVING
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.schedule import Program


class StockObserver(Feature):
    """Fills a record of Megatron's own schedules; without one it does nothing. Results are passed through untouched.

    Args:
        record: of the run, or ``None``.
        costs: prices of the plan.
        priced_by: where ``costs`` are from.
    """

    def __init__(self, record: RunRecord | None, costs: Costs, priced_by: str):
        self._of_run = record
        self._known = Knowledge(costs, priced_by)
        self._observed: Observation | None = None
        self._last_stage = 0
        self._plans: dict[tuple[str, Shape], Choice] = {}
        # Megatron's backward step is not told its stage and microbatch, but it gets the forward's output object.
        self._forward_of: dict[int, Action] = {}

    @property
    def _record(self) -> RunRecord:
        assert self._of_run is not None, "without a record nothing is replaced"
        return self._of_run

    def replacements(self) -> Replacements:
        if self._of_run is None:
            return []
        return [
            (WITH_INTERLEAVING, partial(self._forward_backward, "interleaved")),
            (WITHOUT_INTERLEAVING, partial(self._forward_backward, "1f1b")),
            (FORWARD_STEP, self._forward_step),
            (BACKWARD_STEP, self._backward_step),
            (LINEAR, countable_linear),
        ]

    def _forward_backward(
        self,
        family: str,
        original: Callable,
        *,
        model,
        data_iterator,
        num_microbatches: int,
        forward_only: bool = False,
        **kwargs,
    ) -> list:
        call = {"model": model, "num_microbatches": num_microbatches, "forward_only": forward_only, **kwargs}
        if forward_only:
            return original(data_iterator=data_iterator, **call)
        group = parallel_state.get_pipeline_model_parallel_group()
        chunks = model if isinstance(model, list) else [model]
        self._record.begin(group, get_model_config(chunks[0]))
        self._observed = observed = observe(chunks)
        self._last_stage = group.size() * len(chunks) - 1
        try:
            result = original(data_iterator=watch_batches(data_iterator, observed.counter), **call)
        finally:
            self._observed = None
            self._forward_of.clear()
        with self._record.guarded(STEPS):
            group_size = get_model_config(chunks[0]).microbatch_group_size_per_vp_stage
            shape = Shape(group.size(), len(chunks), num_microbatches, group_size)
            plan = self._plans.get((family, shape))
            if plan is None:
                found = choose(requested(family), shape, self._known)
                plan = replace(found, schedule=replace(found.schedule, name=STOCK), why="Megatron's own")
                self._plans[family, shape] = plan
                announce(plan)
            # What Megatron's loop variables keep alive depends on where the loop is, so its peak is counted, not foretold.
            program = Program(plan.schedule, plan.schedule.orders)
            stages = plan.schedule.placement.stages[group.rank()]
            observed.weights, observed.layers = count_weights(chunks, stages), count_layers(chunks, stages)
            self._record.add_step(plan, program, group.rank(), observed, foretell=False)
        return result

    def _forward_step(self, original: Callable, function, data_iterator, model, number, input_tensor, *args, **kwargs):
        call = (function, data_iterator, model, number, input_tensor, *args)
        observed, action = self._observed, None
        if observed is not None:
            with self._record.guarded(STEPS):
                group = parallel_state.get_pipeline_model_parallel_group()
                stage = (kwargs.get("vp_stage") or 0) * group.size() + group.rank()
                action = Action(Kind.F, stage, kwargs["current_microbatch"])
                self._hold_boundary(input_tensor)
        if observed is None or action is None:
            return original(*call, **kwargs)
        with observed.clock.measure(action), observed.counter.watch_saved():
            result = original(*call, **kwargs)
        with self._record.guarded(STEPS):
            for output in tensors_in(result[0]):
                self._forward_of[id(output)] = action
            if action.stage != self._last_stage:
                self._hold_boundary(result[0])  # until Megatron has sent it and let go of its data
            observed.counter.record(action)
        return result

    def _backward_step(self, original: Callable, input_tensor, output_tensor, output_tensor_grad, config):
        observed, action = self._observed, None
        if observed is not None:
            with self._record.guarded(STEPS):
                (forward,) = {self._forward_of.pop(id(output)) for output in tensors_in(output_tensor)}
                action = forward._replace(kind=Kind.B)
                self._hold_boundary(output_tensor_grad)
        if observed is None or action is None:
            return original(input_tensor, output_tensor, output_tensor_grad, config)
        with observed.clock.measure(action):
            result = original(input_tensor, output_tensor, output_tensor_grad, config)
        with self._record.guarded(STEPS):
            self._hold_boundary(result)
            observed.counter.record(action)
        return result

    def _hold_boundary(self, tensors) -> None:
        assert self._observed is not None
        for tensor in tensors_in(tensors):
            self._observed.counter.hold(tensor)
