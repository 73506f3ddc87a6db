"""Run training steps without a barrier between two steps: the extension, and its part in Megatron's training loop.

The loop asks other ranks about each step. ``TrainingLoop`` answers these questions without communication. Log lines,
evaluations, checkpoints and exits run only when no optimizer step is pending. If a gradient norm is not printed, it is
written to TensorBoard and W&B one step later, under its own iteration.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.overlap_steps.megatron.optimizer import LateNorm, LateSum, OverlappedOptimizer, rounded
from megatron_pipemem.features.overlap_steps.megatron.snapshot import parts_of
from megatron_pipemem.features.overlap_steps.orders import validation_cut
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import gather, run_on_all_ranks
from megatron_pipemem.mcore.loop_arguments import (
    argument,
    prints_log,
    scalar_interval,
    write_scalars,
)
from megatron_pipemem.mcore.step.batches import Rereadable
from megatron_pipemem.mcore.step.extension import Extension, Step, TentativeStart
from megatron_pipemem.mcore.symbols import (
    ALL_OF_PIPELINE,
    DECIDE_EXIT,
    EVALUATE,
    GET_OPTIMIZER,
    GET_TRAINING_OPTIMIZER,
    MOST_OF_PIPELINE,
    SAVE,
    SAVE_AND_TIME,
    SIGNALS,
    STOP_GATHERING,
    TRAIN,
    TRAINING_LOG,
    ZERO_GRAD_BUFFER,
    Replacements,
)
from megatron_pipemem.refusals import barrier_reasons
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.stream import LEAST_GAIN, gain_without_barrier


class _UnwrittenNorm(NamedTuple):
    """A gradient norm that has not been written to TensorBoard and W&B."""

    iteration: int  # the iteration of the norm's step
    samples: int  # samples that the run has consumed by the end of this step
    norm: LateNorm  # the sum over ranks may not have arrived yet


class TrainingLoop:
    """The replacements of functions of Megatron's training loop in a run with overlapping steps."""

    def __init__(self, optimizer: OverlappedOptimizer):
        self._optimizer = optimizer
        self._unwritten: _UnwrittenNorm | None = None
        self._signals: LateSum | None = None

    def replacements(self) -> Replacements:
        """Return each replaced symbol of ``megatron.training`` with its replacement."""
        return [
            (ALL_OF_PIPELINE, self._all_of_pipeline),
            (MOST_OF_PIPELINE, self._most_of_pipeline),
            (TRAINING_LOG, self._training_log),
            *((symbol, self._resolve_first) for symbol in (SAVE_AND_TIME, SAVE, EVALUATE, STOP_GATHERING)),
            (DECIDE_EXIT, self._decide_exit),
            (SIGNALS, self._signals_received),
            (TRAIN, self._train),
        ]

    def _all_of_pipeline(self, original: Callable, value: bool, *args, **kwargs) -> bool:
        """Return ``value``, this rank's success of the step, in place of a logical AND over the pipeline's ranks.

        Every rank takes its step, so the result is the same. After a step that waited for its norm, call ``original``.
        """
        return value if self._optimizer.answers_locally else original(value, *args, **kwargs)

    def _most_of_pipeline(self, original: Callable, value: LateNorm | float | None, *args, **kwargs):
        """Return ``value``, a norm or learning rate, rounded to fp32, in place of a maximum over the pipeline's ranks.

        The value is the same on every rank. After a step that waited for its norm, call ``original``.
        """
        if not self._optimizer.answers_locally:
            return original(value, *args, **kwargs)
        if isinstance(value, LateNorm):
            return value.in_single()
        return value if value is None else rounded(value)

    def _training_log(self, original: Callable, *args, **kwargs):
        self._write_norm()
        bound = inspect.signature(original).bind(*args, **kwargs)
        arguments = bound.arguments
        iteration, norm = arguments["iteration"], arguments["grad_norm"]
        if prints_log(iteration, arguments.get("is_first_iteration", False)) or iteration == argument("train_iters"):
            self._optimizer.resolve()
            self._optimizer.answers_locally = False
            arguments["grad_norm"] = norm.item() if isinstance(norm, LateNorm) else norm
        elif isinstance(norm, LateNorm):
            arguments["grad_norm"] = None
            self._unwritten = _UnwrittenNorm(iteration, argument("consumed_train_samples"), norm)
        return original(*bound.args, **bound.kwargs)

    def _write_norm(self) -> None:
        """Write the gradient norm of the previous step to TensorBoard and W&B. By now every rank has ended that step.

        Do nothing if that norm was printed, or if its iteration is not one for which the loop writes scalars.
        """
        unwritten, self._unwritten = self._unwritten, None
        interval = scalar_interval()
        if unwritten is None or interval is None or unwritten.iteration % interval:
            return
        value = unwritten.norm.item()
        write_scalars({"grad-norm": value}, unwritten.iteration)
        write_scalars({"grad-norm vs samples": value}, unwritten.samples, wandb=False)

    def _resolve_first(self, original: Callable, *args, **kwargs):
        self._optimizer.resolve()
        return original(*args, **kwargs)

    def _decide_exit(self, original: Callable, *args, **kwargs):
        leaves = original(*args, **kwargs)
        if leaves:
            self._optimizer.resolve()
            self._write_norm()
        return leaves

    def _signals_received(self, original: Callable[[Any], list], handler: Any) -> list:
        """Return ``[whether any rank had an exit signal one step ago]``, and start asking for this step.

        The first list is empty. If the steps keep their barrier, call ``original``.
        """
        if not self._optimizer.overlaps:
            return original(handler)
        earlier, self._signals = self._signals, self._optimizer.total(float(handler._signal_received))
        return [] if earlier is None else [earlier.result().item() > 0]

    def finish(self) -> None:
        """Wait for the sum over ranks that ``_signals_received`` has started."""
        if self._signals is not None:
            self._signals.result()
            self._signals = None

    def _train(self, original: Callable, *args, **kwargs):
        result = original(*args, **kwargs)
        self._optimizer.resolve()
        return result


logger = logging.getLogger(__name__)

cut_of = lru_cache(maxsize=16)(validation_cut)
"""The cached cut of a program. Two programs are the same only if they are one object."""


class OverlappedSteps(Extension):
    """The extension that lets each rank begin a training step when it has done its own part of the previous one.

    If the run clips gradients, a step needs its norm, which becomes known during the next step. So that one begins with
    forwards that can be dropped (``LeadingForwards``). Before any other action, it checks whether the weights were
    right.
    """

    def __init__(self, optimizer: OverlappedOptimizer):
        self._optimizer = optimizer
        self._loop = TrainingLoop(self._optimizer)
        self._gains: dict[Shape, bool] = {}

    def replacements(self) -> Replacements:
        optimizer = self._optimizer
        return [
            *((symbol, optimizer.catch) for symbol in (GET_OPTIMIZER, GET_TRAINING_OPTIMIZER)),
            (ZERO_GRAD_BUFFER, optimizer.zero_chunk),
            *self._loop.replacements(),
        ]

    def choose(self, step: Step) -> None:
        """Resolve a pending optimizer step before an evaluation, which needs the final weights."""
        if step.forward_only:
            self._optimizer.resolve()

    def prepare(self, step: Step) -> None:
        if step.forward_only:
            return
        if step.shape not in self._gains:
            self._gains[step.shape] = self._decide(step)
        self._optimizer.overlaps = step.overlaps = self._gains[step.shape]
        step.overlap = self._optimizer.statistics
        if self._optimizer.is_pending:
            step.tentative_start = LeadingForwards(self._optimizer, step)

    def wait_for_overlapped_steps(self) -> None:
        """Make a pending optimizer step final, or redo it. Every rank must call this at the same time."""
        self._optimizer.resolve()

    def _decide(self, step: Step) -> bool:
        """Return whether steps of this shape overlap, and log the reason or the gain.

        All ranks of the model call this at the same time, and get the same result. Sums of norms go over all ranks of
        the job, so a model on a part of them keeps its barrier.
        """
        optimizer, groups = self._optimizer, step.program_store.deciding_groups
        checked = step.program_store.request, step.context.config, step.chunks, optimizer.require()
        joined = run_on_all_ranks(lambda: check_overlapped(*checked), groups)
        gain = self._gain(step)
        obstacles = gather(next(iter(joined), None) or self._obstacle(step, gain), groups)
        if dist.is_initialized() and len(obstacles) < dist.get_world_size():
            obstacles.append("some ranks of the job do not train this model")
        obstacle = next(filter(None, obstacles), None)
        if obstacle is not None:
            tell(logger, "steps keep their barrier: %s", obstacle, level=logging.WARNING)
            return False
        if not any(self._gains.values()):
            optimizer.open(step.pipeline.group, on_host=step.program_store.queues == (True,))
        tell(
            logger, "steps follow each other without a barrier; the plan predicts that this is %.3f times as fast", gain
        )
        return True

    def _gain(self, step: Step) -> float:
        """Return the simulated speed-up of consecutive steps without a barrier, for example 1.05."""
        return gain_without_barrier(step.planned.schedule, step.planned.costs)

    def _obstacle(self, step: Step, gain: float) -> str | None:
        """Return why overlapping steps are useless or impossible on this rank, or ``None``."""
        optimizer = self._optimizer.require()
        if gain <= LEAST_GAIN:
            name = step.planned.schedule.name
            return f"schedule {name} with {step.shape.num_microbatches} microbatches gains nothing without a barrier"
        if step.tokens is None:
            return "every step begins with an agreement on the lengths of its sequences"
        if any(part.is_stub_optimizer for part in optimizer.chained_optimizers):
            return "a rank trains no parameters"
        is_readable = all(iterator is None or hasattr(iterator, "__next__") for iterator in step.iterators)
        if self._optimizer.may_undo_steps and not is_readable:
            return "a data iterator has no __next__, so a step that starts over could not read its data again"
        return None

    def close(self, orderly: bool) -> None:
        """Settle a pending optimizer step if ``orderly``. Restore the optimizer's own ``step`` and ``zero_grad``."""
        if orderly:
            self._loop.finish()
        self._optimizer.release(orderly)
        self._gains.clear()


class LeadingForwards(TentativeStart):
    """The forwards at the start of a step, which run before it is known whether the previous step must be redone.

    The step's data iterators are wrapped, so that the step can read its data a second time.
    """

    def __init__(self, optimizer: OverlappedOptimizer, step: Step):
        self._optimizer, self._step = optimizer, step
        cut = cut_of(step.program)
        device = step.pipeline.device
        self.length, self.drain = cut.lengths[device], cut.drains[device]
        self._data = [None if iterator is None else Rereadable(iterator) for iterator in step.iterators]
        step.iterators = list(self._data)
        self._random_states = random._get_all_rng_states()
        self._traces = ForwardTraces()

    def is_confirmed(self) -> bool:
        return self._optimizer.validate()

    def start_over(self) -> None:
        self._optimizer.redo()
        step = self._step
        for iterator in self._data:
            if iterator is not None:
                iterator.rewind()
        random._set_all_rng_states(*self._random_states)
        self._traces.restore()
        step.context.loss_data.clear()
        step.context.num_tokens.zero_()


def check_overlapped(request: Request, config, chunks: list[torch.nn.Module], optimizer: ChainedOptimizer) -> list[str]:
    """Return the settings because of which all ranks wait for each other after every step anyway, as sentences.

    Raise an UnsupportedError for a configuration or an optimizer that needs a barrier between steps.
    """
    holders = [config, optimizer.config, *(getattr(chunk, "ddp_config", None) for chunk in chunks)]

    def value_of(attribute: str) -> object:
        values = (argument(attribute), *(getattr(holder, attribute, None) for holder in holders))
        return next(filter(None, values), None)

    check_gates(GateQuestion(request, value_of))
    if type(optimizer) is not ChainedOptimizer or not optimizer.grads_states_parallel_group_is_shared():
        raise UnsupportedError(
            "unsupported-setting",
            "gradient norms of experts and of other parameters are summed over different groups of ranks, but steps without "
            "a barrier need one group; pass --use-distributed-optimizer, or drop --pipemem-overlap-steps",
        )
    if optimizer.config.clip_grad > 0 and not request.is_asynchronous:  # else steps are never undone
        parts_of(optimizer)
    return barrier_reasons(value_of)


class ForwardTraces:
    """A copy of the sums in which Megatron collects the losses of experts and of multi-token prediction for its log."""

    def __init__(self) -> None:
        self._kept = {key: tensor.clone() for key, tensor in _counted()}

    def restore(self) -> None:
        """Set Megatron's sums back to the values that they had when this object was made. Sums without one become 0."""
        for key, tensor in _counted():
            tensor.copy_(self._kept[key]) if key in self._kept else tensor.zero_()


def _counted() -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    for name, entry in get_moe_metrics_tracker().metrics.items():
        yield ("experts", name), entry.values
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, torch.Tensor):
            yield ("depths", name), value


def extensions(*_: object) -> list[Extension]:
    """Return the extension that lets training steps overlap."""
    return [OverlappedSteps(OverlappedOptimizer())]
