"""Run the training steps of an asynchronous schedule, whose pipeline is not emptied between steps.

The state of the pipeline is kept from one call of the forward-backward function to the next.

A checkpoint of Megatron has the newest weights. Microbatches in flight are not saved: their data count as not consumed,
and a resumed run reads them and runs their forwards again. These forwards used older weights. So every rank writes its
older weights to the checkpoint's folder. Without such files, a resumed run begins with the newest weights as its only
version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_pipemem.choose.knowledge import Choice, Shape
from megatron_pipemem.conflicts import is_updated_per_microbatch
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.asynchronous.runtime import WeightSwitch, WeightVersions
from megatron_pipemem.files import whole_file
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import agree, gather
from megatron_pipemem.mcore.loop_arguments import checkpoint_folder, steps_left
from megatron_pipemem.mcore.programs import Compiled, ProgramStore, announce, digest_of
from megatron_pipemem.mcore.step.extension import Extension, Step, WeightBytes, untimed
from megatron_pipemem.mcore.symbols import GET_OPTIMIZER, GET_TRAINING_OPTIMIZER, LOAD, SAVE, Replacements
from megatron_pipemem.refusals import TIED, of_config
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.executor import InFlight, StepFeature
from megatron_pipemem.schedule import stream as windows
from megatron_pipemem.schedule.simulator import Timeline

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedVersions:
    """The older weight versions of a rank when a checkpoint is written, and the number of batches before it."""

    schedule: str  # the name of the family, with its options
    batch: int  # microbatches per step
    before: int  # batches that have passed through the pipeline
    older: Mapping[int, Mapping[torch.dtype, torch.Tensor]]  # by version number, the buffers of each older version

    def fits(self, schedule: str, weights: WeightVersions) -> bool:
        """Return whether the saved versions are of this schedule and have the sizes of ``weights``."""
        sizes = weights.sizes
        return self.schedule == schedule and all(
            {dtype: buffer.numel() for dtype, buffer in buffers.items()} == sizes for buffers in self.older.values()
        )


def save(saved_now: Callable[[], SavedVersions | None], original: Callable, iteration, *args, **kwargs):
    """Save a checkpoint by ``original`` (``save_checkpoint``), and write the older versions of the weights to its
    folder.

    Non-persistent checkpoints get no file. If it cannot be written, a warning is logged and the checkpoint stays valid.
    """
    result = original(iteration, *args, **kwargs)
    saved = saved_now()
    if saved is not None and not kwargs.get("non_persistent_ckpt", False):
        try:
            _write(saved, iteration)
        except (OSError, RuntimeError) as error:  # of torch; the checkpoint itself is whole, and can be resumed without
            logger.warning("%s; a run that resumes from this checkpoint begins with the newest weights alone", error)
    return result


def load(loaded: Callable[[SavedVersions | None], None], original: Callable, *args, load_arg="load", **kwargs):
    """Load a checkpoint by ``original`` (``load_checkpoint``), and pass the older versions in its folder to ``loaded``.

    It gets ``None`` on all ranks if there is no checkpoint, or if the file of any rank is missing. It is not called for
    a checkpoint of another flag (``load_arg``), such as ``pretrained_checkpoint``.
    """
    result = original(*args, load_arg=load_arg, **kwargs)
    if load_arg == "load":
        loaded(_read(result[0]) if result[0] else None)
    return result


def _file(purpose: str, iteration: int):
    return checkpoint_folder(purpose, iteration) / f"pipemem_weights_{dist.get_rank():05d}.pt"


def _write(saved: SavedVersions, iteration: int) -> None:
    path = _file("save", iteration)
    older = {version: list(buffers.values()) for version, buffers in saved.older.items()}
    entries = {"schedule": saved.schedule, "batch": saved.batch, "before": saved.before, "older": older}
    with whole_file(path) as partial_path:
        torch.save(entries, partial_path)


def _read(iteration: int) -> SavedVersions | None:
    path = _file("load", iteration)
    if not all(gather(path.is_file())):  # of the job, all ranks of which load a checkpoint
        tell(
            logger,
            "a rank has no older weights in the checkpoint's folder, so the first microbatches use the newest weights, as "
            "at the start of a run",
            level=logging.WARNING,
        )
        return None
    entries = torch.load(path, map_location="cpu", weights_only=True)
    older = {version: {tensor.dtype: tensor for tensor in tensors} for version, tensors in entries.pop("older").items()}
    return SavedVersions(**entries, older=older)


if TYPE_CHECKING:  # loaded where ranks do not wait for each other at the end of a batch
    from megatron_pipemem.features.asynchronous.megatron.delayed import DelayedOptimizer

WARNING = (
    "schedule %s is asynchronous: gradients are of older weights, so training does not equal synchronous training, and "
    "losses are not those of Megatron's own schedule"
)


@dataclass
class _Stream:
    """The state of a pipeline on this rank between two steps: weight versions and microbatches in flight."""

    chunks: list[torch.nn.Module]  # the model chunks of this rank
    weights: WeightVersions  # the versions of their weights
    batch: int  # microbatches per step
    before: int = 0  # batches that have passed through the pipeline
    done: int = 0  # batches, from the next one on, of which some forwards have run
    in_flight: InFlight = field(default_factory=InFlight)  # the tensors of these forwards, and inputs that have arrived
    ledger: ActivationLedger | None = None  # counts the activations of these forwards
    left: int | None = None  # training steps after the last one that ran, if known
    # The scale of the routers' auxiliary losses in the last step, if the model has experts.
    router_scale: torch.Tensor | None = None

    def drop(self, waits: bool) -> None:
        """Drop all microbatches in flight and all weight versions but the newest, which gets number 0.

        If the last batch's optimizer step ``waits``, it gets number -1, because this step will make version 0.
        """
        self.weights.keep_only_newest()
        self.weights.renumber(-self.weights.newest - waits)
        self.before = self.done = 0
        self.in_flight, self.ledger = InFlight(), None


@dataclass(frozen=True, kw_only=True)
class WindowPlan(Choice):
    """The plan of a training step, with the window: the part of the endless schedule that runs in this step.

    Steps at the same ``Moment`` share one plan, for example all that are far from the first and from the last step.
    """

    window: windows.Window

    @cached_property
    def timeline(self) -> Timeline:
        return self.window.simulate(self.costs)


class StepCall(NamedTuple):
    """The plan of the current training step on this rank."""

    plan: WindowPlan
    device: int  # the pipeline rank of this process
    left: int | None  # training steps after this one, if known


class StageOptimizer:
    """Takes over the optimizer that the training loop builds, and steps it after every microbatch."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._caught: Any = None

    def catch(self, original: Callable, config, model_chunks, *args, **kwargs):
        """Build the optimizer with ``original`` (``get_megatron_optimizer``). Its ``step()``, which the loop calls,
        does nothing and reports success. An optimizer that was caught before gets its own ``step()`` back.
        """
        optimizer = original(config, model_chunks, *args, **kwargs)
        check_gates(GateQuestion(self._request, of_config(config)))
        self.release()
        self._caught = optimizer
        # The loop steps once per batch. By then the stage has done so for every microbatch.
        optimizer.step = lambda: (True, None, None)
        return optimizer

    def step(self, chunks: list[Any], reduce: Callable[[], None]) -> None:
        """Sum the gradients of ``chunks`` by ``reduce``, update the parameters with them, and zero them."""
        with untimed(get_model_config(chunks[0]), self._caught):
            reduce()
            self._caught.prepare_grads()
            self._caught.step_with_ready_grads()
        for chunk in chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        self._caught.zero_grad()

    def require(self) -> None:
        """Raise an UnsupportedError if no optimizer has been built since ``enable()``."""
        if self._caught is None:
            raise UnsupportedError(
                "enabled-too-late",
                "this schedule steps the optimizer after every microbatch, but no optimizer was built since enable(); "
                "call enable() before get_megatron_optimizer() is imported and called",
            )

    def release(self) -> None:
        """Give the caught optimizer its own ``step()`` again, and forget this optimizer."""
        if self._caught is not None:
            del self._caught.step
            self._caught = None


class AsynchronousTraining(Extension):
    """The extension that runs the training steps of an asynchronous schedule.

    ``train_steps`` is the number of training steps of the run. If it is ``None`` and the loop is not Megatron's, the
    last step too reads data of a next step. ``delayed`` takes the optimizer steps if ranks do not wait for each other
    at the end of a batch.
    """

    only_trains = True

    def __init__(self, programs: ProgramStore, train_steps: int | None = None, delayed: DelayedOptimizer | None = None):
        self._programs, self._delayed = programs, delayed
        # Whether the optimizer steps once per call, by the training loop, and not once per microbatch.
        self._loop_updates = windows.updates_per_batch(programs.name)
        self._train_steps = train_steps
        self._steps = 0
        # Tells schedules apart whose older weights mean different things.
        self._identity = f"{programs.name} {sorted(programs.request.options.items())}"
        self._plans: dict[tuple[Shape, windows.Moment, bool], WindowPlan] = {}
        self._stream: _Stream | None = None
        self._optimizer = StageOptimizer(programs.request)
        self._saved: SavedVersions | None = None
        self._call: StepCall | None = None
        tell(logger, WARNING, programs.name, level=logging.WARNING)

    def replacements(self) -> Replacements:
        replaced: Replacements = [(SAVE, partial(save, self._to_save)), (LOAD, partial(load, self._loaded))]
        if not self._loop_updates:
            replaced += [(symbol, self._optimizer.catch) for symbol in (GET_OPTIMIZER, GET_TRAINING_OPTIMIZER)]
        return replaced

    def choose(self, step: Step) -> Compiled:
        """Return the program of the step. It continues with the microbatches that the previous step left in flight."""
        chunks, shape, device = step.chunks, step.shape, step.pipeline.device
        check_untied(self._programs.request, chunks)
        if not self._loop_updates:
            self._optimizer.require()
            step.context.num_microbatches = 1  # an update averages over one microbatch
        step.finalizes = self._loop_updates
        stream = self._stream_of(chunks, shape.num_microbatches)
        far = windows.horizon(shape.num_devices, shape.num_microbatches)
        left = self._left(stream)
        moment = windows.Moment(min(stream.before, far), min(stream.done, far), far if left is None else min(left, far))
        plan = self._plan(shape, moment, step.single_queue, step.pipeline.group)
        stream.weights.reserve(plan.window.versions_held[device])
        stream.weights.forget_updates()
        if self._delayed is not None:
            self._delayed.weights = stream.weights
        self._call = StepCall(plan, device, left)
        return Compiled(plan.window.program, plan)

    @property
    def _current(self) -> tuple[_Stream, StepCall]:
        """The pipeline's state and the plan of the current step, both set by ``choose``."""
        assert self._stream is not None and self._call is not None
        return self._stream, self._call

    def prepare(self, step: Step) -> None:
        # The step begins with the state that the one before has left.
        stream, call = self._current
        step.leaves_in_flight, step.earlier_ledger = True, stream.ledger
        step.buffers += stream.weights.buffers()
        step.weight_bytes, step.recorded_program = self._weight_bytes, call.plan.window.up_to_its_end

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        stream, call = self._current
        stream.ledger = step.observation.ledger
        window, weights, delayed = call.plan.window, stream.weights, self._delayed
        own = window.stream.placement.stages[call.device]
        updates = {action: needed for action, needed in window.updates.items() if action.stage in own}

        def update(needed: Collection[int]) -> None:
            weights.advance(needed)
            if not self._loop_updates:
                self._optimizer.step(step.chunks, lambda: step.finalize(None))
                weights.forget_updates()

        if delayed is not None and delayed.overlaps:
            return [WeightSwitch(weights, window.versions, {}, update, delayed.resolve)]
        return [WeightSwitch(weights, window.versions, updates, update)]

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Give the executor the microbatches in flight, and keep those after the step. If the step fails, drop all."""
        stream, call = self._current
        window = call.plan.window
        # Only this call keeps the forwards in flight: they go when their backwards have run.
        left, stream.in_flight = stream.in_flight, InFlight()
        step.executor.take_in(left)
        del left
        if stream.router_scale is not None:
            # Backwards of forwards that ran before an evaluation, which divides by its own number of microbatches.
            MoEAuxLossAutoScaler.set_loss_scale(stream.router_scale)
        try:
            yield
        except BaseException:
            stream.drop(self._has_postponed_step)
            raise
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        stream.router_scale = None if scale is None else scale.clone()
        stream.weights.renumber(-window.updates_per_call)
        stream.weights.show(stream.weights.newest)
        stream.in_flight = step.executor.in_flight().renumbered(-window.batch)
        stream.before += 1
        stream.done = window.moment.left
        stream.left = call.left
        self._steps += 1

    @property
    def _has_postponed_step(self) -> bool:
        """Whether the optimizer step of the last batch has been postponed and not yet taken."""
        return self._delayed is not None and self._delayed.has_postponed_step

    def _weight_bytes(self) -> WeightBytes:
        """Return the bytes of one weight version, and of all buffers of versions, with the planned and the held number."""
        stream, call = self._current
        weights, device = stream.weights, call.device
        planned = call.plan.window.versions_held[device]
        return WeightBytes({device: weights.version_bytes}, weights.bytes, planned, weights.most_held)

    def _stream_of(self, chunks: list[torch.nn.Module], batch: int) -> _Stream:
        stream = self._stream
        if stream is None or stream.chunks != chunks:
            parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
            self._stream = stream = _Stream(chunks, WeightVersions(parameters), batch)
            self._take_up(stream)
        if stream.batch != batch:
            if stream.before:
                raise UnsupportedError(
                    "batch-changes",
                    f"the number of microbatches changes from {stream.batch} to {batch} while microbatches are in flight; "
                    "asynchronous schedules need one batch size, so drop --rampup-batch-size",
                )
            stream.batch = batch
        return stream

    def _take_up(self, stream: _Stream) -> None:
        """Restore the older weight versions that were saved with the loaded checkpoint, if they fit on every rank."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        fits = saved.batch == stream.batch and saved.fits(self._identity, stream.weights)
        if not all(gather(fits, self._programs.deciding_groups)):
            tell(
                logger,
                "the older weights that were saved with the checkpoint are of another schedule, batch size or split of "
                "the model, so the first microbatches use the newest weights, as at the start of a run",
                level=logging.WARNING,
            )
            return
        stream.weights.restore(saved.older)
        stream.before = saved.before

    def _to_save(self) -> SavedVersions | None:
        stream = self._stream
        if stream is None or not stream.before:
            return None
        return SavedVersions(self._identity, stream.batch, stream.before, stream.weights.older())

    def _loaded(self, saved: SavedVersions | None) -> None:
        """Drop all microbatches in flight. The next step restores ``saved``, the checkpoint's older weight versions."""
        if self._stream is not None:
            self._stream.drop(self._has_postponed_step)
            self._stream = None
        self._saved = saved

    def _left(self, stream: _Stream) -> int | None:
        """Return the number of training steps after this one, or ``None`` if it is unknown."""
        left = steps_left() if self._train_steps is None else self._train_steps - self._steps - 1
        if self._train_steps is not None and left is not None and left < 0:
            raise UnsupportedError(
                "steps-exhausted",
                f"the loop runs more than train_steps={self._train_steps} steps; the last of these left the pipeline "
                "empty, so give enable() the number of all training steps of this run",
            )
        if left is None:
            if stream.before == 0:
                tell(
                    logger,
                    "the number of training steps is unknown, so every step, the last one too, reads data of the next step; "
                    "give it by enable(..., train_steps=N)",
                    level=logging.WARNING,
                )
        elif left == stream.left and stream.before:
            raise UnsupportedError(
                "step-runs-again",
                "the training loop runs the same step again, but its forwards have left the pipeline; pass "
                "--rerun-mode disabled",
            )
        return left

    def _plan(self, shape: Shape, moment: windows.Moment, single_queue: bool, group: dist.ProcessGroup) -> WindowPlan:
        programs, size = self._programs, (shape.num_devices, shape.num_microbatches)
        if (shape, moment, single_queue) not in self._plans:
            windows.check_batch(programs.name, *size)
            window = windows.family_window(
                programs.name,
                *size,
                moment,
                memory_cap=programs.request.cap_in_units,
                costs=programs.costs,
                single_queue=single_queue,
                **programs.request.options,
            )
            when = "start" if moment.before == 0 else "end" if moment.left == 0 else "no flush between steps"
            plan = WindowPlan(window.schedule, programs.costs, programs.knowledge.priced_by, when, window=window)
            agree(f"{programs.queues} {digest_of(window.program)}", group)
            if not self._plans:
                announce(plan)
            self._plans[shape, moment, single_queue] = plan
        return self._plans[shape, moment, single_queue]

    def close(self, orderly: bool) -> None:
        """Set the model to the newest weights, drop microbatches in flight and plans, and restore ``step()``."""
        if self._stream is not None:
            self._stream.drop(self._has_postponed_step)
            self._stream = None
        self._optimizer.release()
        self._plans.clear()


def check_untied(request: Request, chunks: list[torch.nn.Module]) -> None:
    """Raise an UnsupportedError if the schedule updates after every microbatch, and the embedding is tied to the head."""
    for chunk in chunks if is_updated_per_microbatch(request) else ():
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        if getattr(model, "share_embeddings_and_output_weights", False):
            raise UnsupportedError("tied-embedding", TIED)
