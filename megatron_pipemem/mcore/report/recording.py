"""Record the steps of our schedules or of Megatron's own, and the losses that Megatron's training loop logs.

The numbers of each step also go to TensorBoard and W&B, through the writers that this loop has opened.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Choice, Knowledge, Shape
from megatron_pipemem.conflicts import make_request
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.loop_arguments import prints_log, saves_after, scalar_interval, write_scalars
from megatron_pipemem.mcore.model.linear import countable_linear
from megatron_pipemem.mcore.model.stages import tensors_in, watch_batches
from megatron_pipemem.mcore.programs import announce
from megatron_pipemem.mcore.report.run_record import LOSSES, STEPS, RunRecord
from megatron_pipemem.mcore.report.run_report import RecordedStep, count_layers
from megatron_pipemem.mcore.step.extension import Extension, Observation, Step, count_weights, device_of, observe
from megatron_pipemem.mcore.symbols import (
    BACKWARD_STEP,
    FORWARD_STEP,
    LINEAR,
    SAVE_AND_TIME,
    TRAIN,
    TRAINING_LOG,
    WITH_INTERLEAVING,
    WITHOUT_INTERLEAVING,
    Feature,
    Replacements,
)
from megatron_pipemem.results import bubble_of_steps, busiest
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.schedule import Program

_Numbers = tuple[RecordedStep, int | None, float]
"""The last step of a rank, its predicted peak in bytes, and its planned bubble rate."""


class Recording(Extension):
    """Records every training step, and writes the report after the training loop and its last checkpoint.

    It also writes scalars of the last rank's pipeline to TensorBoard and W&B, as often as Megatron does. The times of a
    step are known one step later. So its scalars are written one step late, under its iteration's number.
    """

    only_trains = True

    def __init__(self, record: RunRecord):
        self._record = record
        self._iteration: int | None = None
        self._overlaps = False
        self._allocated: int | None = None
        self._unwritten: list[tuple[int, _Numbers | None]] = []
        self._is_due = False

    def prepare(self, step: Step) -> None:
        self._record.begin(step.pipeline.group, has_barrier=not step.overlaps)
        self._overlaps, self._record.overlap = step.overlaps, step.overlap
        step.counts_bytes |= step.leaves_in_flight or self._record.counts(step.program)
        step.times_actions = True
        self._allocated = torch.cuda.memory_allocated() if device_of(step.chunks).type == "cuda" else None

    def after(self, step: Step) -> None:
        observation = step.observation
        with self._record.guarded(STEPS):
            observation.offload = step.offload_statistics()
            observation.bytes_of_message, observation.opened_bytes = step.message.bytes_of, step.pipeline.opened_bytes
            observation.allocated = self._allocated
            observation.layers = count_layers(step.chunks, step.pipeline.stages)
            observation.weights = step.weight_bytes()
            if observation.weights is None and observation.ledger is not None:
                observation.weights = count_weights(step.chunks, step.pipeline.stages)
            program = step.recorded_program or step.program
            self._record.add_step(step.planned, program, step.pipeline.device, observation, own_plan=step.own_plan)

    def replacements(self) -> Replacements:
        return [(TRAINING_LOG, self._training_log), (TRAIN, self._train), (SAVE_AND_TIME, self._save)]

    def _training_log(self, original: Callable, loss_dict, *args, **kwargs):
        with self._record.guarded(LOSSES):
            arguments = inspect.signature(original).bind(loss_dict, *args, **kwargs).arguments
            iteration = arguments["iteration"]
            joined = not self._overlaps or prints_log(iteration, arguments.get("is_first_iteration", False))
            self.write_scalars(iteration, joined)  # first: it may be collective
            self._record.add_losses(loss_dict, arguments["grad_norm"])
        return original(loss_dict, *args, **kwargs)

    def _save(self, original: Callable, *args, **kwargs):
        result = original(*args, **kwargs)
        if self._is_due:
            self._write()
        return result

    def _train(self, original: Callable, *args, **kwargs):
        try:
            result = original(*args, **kwargs)
        except SystemExit as stop:
            # Megatron also ends its loop this way, on all ranks, when a time or iteration limit is reached. It has then
            # saved its checkpoint, and closed W&B.
            if not stop.code:
                self._record.write()
            raise
        self._is_due = saves_after(result[0])
        if not self._is_due:
            self._write()
        return result

    def _write(self) -> None:
        self._is_due = False
        self._record.write()
        self.write_scalars(None)

    def write_scalars(self, following: int | None, now: bool = True) -> None:
        """Write the scalars of the previous step. Every rank calls this when its loop is about to log an iteration.

        ``following`` is this iteration's number, or ``None`` after the last step, when its times have been read.
        Without ``now``, the scalars are kept for a later call, because writing them would wait for other ranks.
        """
        iteration, self._iteration = self._iteration, following
        interval = scalar_interval()
        if iteration is not None and interval is not None and iteration % interval == 0:  # on every rank alike
            self._unwritten.append((iteration, self._numbers()))
        if not now or not self._unwritten:
            return
        unwritten, self._unwritten = self._unwritten, []
        with self._record.guarded("scalars"):
            own = [numbers for _, numbers in unwritten]
            pipeline = gather(own, [parallel_state.get_pipeline_model_parallel_group()])
            for (step, _), *ranks in zip(unwritten, *pipeline, strict=True):
                if None not in ranks:
                    write_scalars(_of_pipeline(ranks), step)

    def _numbers(self) -> _Numbers | None:
        """Return this rank's last step, predicted peak in bytes and planned bubble rate; ``None`` if not measured."""
        record = self._record
        with record.guarded(STEPS):
            if record.is_whole and record.steps and record.last_plan is not None:
                return record.steps[-1], record.peaks.predicted_peak_bytes, record.last_plan.timeline.bubble_rate
        return None


def _of_pipeline(ranks: Sequence[_Numbers]) -> dict[str, float]:
    steps, predicted, planned = zip(*ranks, strict=True)
    makespan = max(step.span[1] for step in steps) - min(step.span[0] for step in steps)
    scalars = {
        "pipemem/peak-activation-bytes": max(step.peak_bytes for step in steps),
        "pipemem/bubble-rate": busiest(bubble_of_steps([(step.work_seconds, makespan)]) for step in steps) or 0.0,
        "pipemem/planned-bubble-rate": planned[0],
        "pipemem/makespan-seconds": makespan,
    }
    if None not in predicted:
        scalars["pipemem/predicted-peak-activation-bytes"] = max(predicted)
    return scalars


# Megatron's own schedules are measured by the same ledger and clock as ours.
#
# Megatron's loops run the actions of our ``1f1b`` and ``interleaved``, so a stock run has a plan too.


class StockObserver(Feature):
    """Measures the steps of Megatron's own schedules without changing their results."""

    def __init__(self, record: RunRecord, costs: Costs, priced_by: str):
        self._record = record
        self._knowledge = Knowledge(costs, priced_by)
        self._observed: Observation | None = None
        self._last_stage = 0
        self._plans: dict[tuple[str, Shape], Choice] = {}
        # Megatron's backward step gets neither stage nor microbatch, but the output object of the forward.
        self._forward_of: dict[int, Action] = {}

    def replacements(self) -> Replacements:
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
        config = get_model_config(chunks[0])
        self._record.begin(group)
        with self._record.guarded(STEPS):
            if config.overlap_moe_expert_parallel_comm:
                raise UnsupportedError(
                    "not-for-stock",
                    "Megatron's own schedule runs passes in pairs, layer by layer, so single passes have no times; measure "
                    "--pipemem-schedule interleaved, or drop --overlap-moe-expert-parallel-comm",
                )
        if not self._record.is_whole:
            return original(data_iterator=data_iterator, **call)
        self._observed = observed = observe(chunks)
        self._last_stage = group.size() * len(chunks) - 1
        try:
            result = original(data_iterator=watch_batches(data_iterator, observed.counter.exclude), **call)
        finally:
            self._observed = None
            self._forward_of.clear()
        with self._record.guarded(STEPS):
            observed.counter.end_step(num_microbatches)
            group_size = config.microbatch_group_size_per_vp_stage
            shape = Shape(group.size(), len(chunks), num_microbatches, group_size)
            plan = self._plans.get((family, shape))
            if plan is None:
                choice = choose(make_request(family), shape, self._knowledge)
                plan = replace(choice, schedule=replace(choice.schedule, name=STOCK), why="Megatron's own")
                self._plans[family, shape] = plan
                announce(plan)
            # Megatron's loop holds tensors in variables, which depend on its position. So its peak is counted, not predicted.
            program = Program(plan.schedule, plan.schedule.orders)
            stages = plan.schedule.placement.stages[group.rank()]
            observed.weights, observed.layers = count_weights(chunks, stages), count_layers(chunks, stages)
            self._record.add_step(plan, program, group.rank(), observed, predicts_peaks=False)
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
