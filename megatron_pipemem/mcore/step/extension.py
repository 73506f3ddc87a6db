"""The state of one training step, and the base class of extensions, by which features take part in a step."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import DummyTimer, Timers

from megatron_pipemem import queues as queue_settings
from megatron_pipemem.choose.knowledge import Choice, Shape
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import Groups, largest_numbers
from megatron_pipemem.mcore.loop_arguments import argument
from megatron_pipemem.mcore.model.stages import ChunkStage, Exclude, StepContext
from megatron_pipemem.mcore.model.transformer_engine import uncountable
from megatron_pipemem.mcore.programs import Compiled, ProgramStore
from megatron_pipemem.mcore.symbols import Feature
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.executor import Executor, StepFeature
from megatron_pipemem.runtime.transport import MessageFormat, Pipeline
from megatron_pipemem.schedule.action import Action
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Program

if TYPE_CHECKING:  # loaded where a step is timed
    from megatron_pipemem.runtime.trace import OffloadStatistics, Trace

logger = logging.getLogger(__name__)

# Some steps on a GPU run by the order for one hardware queue per rank (``queues``). A host waits for its device at the
# first launch of a kernel: CUDA loads the kernel, and that waits for all running work, posted messages included. Later
# launches do not wait. Megatron's timers of level 2 make every host wait around every pass, in every step. A host also
# waits when its allocator gives memory back. The usual order is proved for one host that waits at a time.

FIRST_STEPS = 2
"""Steps of a kind that may launch a kernel for the first time. The second adds to existing gradients."""
LATE_STEPS = 50
"""As ``FIRST_STEPS``, if sizes within a pass differ from step to step. It is also the number of steps that run for one
queue when an allocator has given memory back."""
STEPS_BETWEEN_AGREEMENTS = 10
"""Steps after which the ranks agree again on whether an allocator has given memory back. To agree, hosts wait."""


def can_make_hosts_wait(device: torch.device) -> bool:
    """Return whether posted messages are work of this device, so that a host that waits for it waits for them."""
    return device.type == "cuda"


def times_passes(timers: Timers | None) -> bool:
    """Return whether Megatron's timers time every F, I and B. Timers above the level of the run are dummies.

    Megatron's loop evaluates without the model's ``timers``, but a forward step may have timers of its own.
    """
    if (argument("timing_log_level") or 0) >= queue_settings.TIMED_PASSES:
        return True
    return timers is not None and not isinstance(
        timers("forward-compute", log_level=queue_settings.TIMED_PASSES), DummyTimer
    )


def launches_late(config: Any) -> bool:
    """Return whether sizes within a pass differ from step to step, so that a late step may need a new kernel.

    Experts get other numbers of tokens in every step, unless they are padded to their capacity. Attention gets
    documents of other lengths if sequences are packed. ``config`` is the model's.
    """
    is_padded = (
        getattr(config, "moe_pad_expert_input_to_capacity", False) and config.moe_expert_capacity_factor is not None
    )
    routes = bool(getattr(config, "num_moe_experts", None)) and not is_padded
    return routes or bool(argument("sft")) or bool(argument("dataloader_inter_document_masking"))


def times_memory_was_given_back(device: torch.device) -> int:
    """Return how often the allocator of this rank has given memory back to its device or has flushed its cache."""
    statistics = torch.cuda.memory_stats(device)
    return statistics["num_device_free"] + statistics["num_alloc_retries"]


@contextmanager
def untimed(config: Any, optimizer: Any) -> Iterator[None]:
    """Within a ``with`` block, run an optimizer step that stands between passes without Megatron's timers.

    They would make the host wait for its device, and with a barrier for all other ranks. ``config`` is the model's.
    """
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    configs = [config, *(chained.config for chained in optimizers)]
    timers_before = [timed.timers for timed in configs]
    for timed in configs:
        timed.timers = None
    try:
        yield
    finally:
        for timed, timers in zip(configs, timers_before, strict=True):
            timed.timers = timers


class LaunchKind(NamedTuple):
    """The properties of a step on which its kernels depend."""

    forward_only: bool
    logits: bool  # whether the step returns other data than losses
    shape: Shape
    message: tuple[int, ...] | None  # shape of every message; ``None`` if messages may differ
    renewals: int  # number of plans that training has had before the step
    pipeline: dist.ProcessGroup | None = None  # two pipelines of a rank need not take the same steps


@dataclass
class _ReturnedMemory:
    """The state of a pipeline of this rank that depends on memory which allocators gave back."""

    steps: int = 0  # steps that have run
    steps_left: int = 0  # steps that still run for one queue
    returned: bool = False  # whether this rank has given memory back since the ranks last agreed


class LaunchOrders:
    """Chooses between the default order of ``lower`` and its order for one hardware queue, step by step.

    A step in which several hosts may wait for their devices needs the order for one hardware queue. With ``forced``,
    all steps run by that order. ``proves_starts`` says whether usual orders are proved for launches that start in order.
    """

    def __init__(self, forced: bool = False, proves_starts: bool = False) -> None:
        self._forced = forced
        self._proves_starts = proves_starts
        self._seen: Counter[LaunchKind] = Counter()
        self._first_steps = FIRST_STEPS
        self._memory: defaultdict[dist.ProcessGroup | None, _ReturnedMemory] = defaultdict(_ReturnedMemory)
        self._logged: str | None = None
        self._times_passes = False

    def queues(self, device: torch.device, config: Any) -> tuple[bool, ...]:
        """Return the kinds of orders of a run, ``True`` for one hardware queue, default first.

        ``config`` is the model's. The log says which steps run by which order, unless the user has forced it.
        """
        if self._forced:
            return (True,)
        if not can_make_hosts_wait(device):
            return (False,)
        # Once seen, it holds for the run: other loops evaluate without timers too, and all programs would be made again.
        self._times_passes = self._times_passes or times_passes(config.timers)
        suffices = queue_settings.ORDERED_STARTS_SUFFICE and self._proves_starts
        reason = queue_settings.why_one_queue(os.environ, self._times_passes, suffices)
        if reason is not None:
            self._log(f"every step runs by the order for one hardware queue: {reason}")
            return (True,)
        is_late = launches_late(config)
        self._first_steps = LATE_STEPS if is_late else FIRST_STEPS
        late = ", because sizes within a pass differ, and late steps may load kernels" if is_late else ""
        self._log(
            f"the first {self._first_steps} steps of a kind run by the order for one hardware queue{late}; all others by "
            "the usual order"
        )
        return (False, True)

    def _log(self, message: str) -> None:
        if message != self._logged:
            self._logged = message
            tell(logger, "%s", message)

    def is_single_queue(self, queues: tuple[bool, ...], kind: LaunchKind) -> bool:
        """Return whether a step of this kind runs by the order for one hardware queue.

        If a run needs both orders, the first steps of a kind do, all steps whose messages may differ, and those after a
        step in which memory was given back. All ranks of the model get the same answer.
        """
        if len(queues) == 1:
            return queues[0]
        # If lengths differ, every step may have a new length, and so launch new kernels.
        return (
            kind.message is None or self._memory[kind.pipeline].steps_left > 0 or self._seen[kind] < self._first_steps
        )

    def agree_on_returns(self, pipeline: dist.ProcessGroup, groups: Groups) -> None:
        """Make the next ``LATE_STEPS`` steps of a pipeline run for one queue if a rank has given memory back in a step.

        Every rank of ``groups``, which reach all ranks of the model, calls this at the same time, before a step. They
        agree every ``STEPS_BETWEEN_AGREEMENTS`` steps, but not before the first: there they compare their programs, so
        that ranks with other settings are named.
        """
        memory = self._memory[pipeline]
        if memory.steps == 0 or memory.steps % STEPS_BETWEEN_AGREEMENTS:
            return
        returned = float(memory.returned)
        for group in groups:
            (returned,) = largest_numbers((returned,), group)
        memory.returned = False
        if returned:
            memory.steps_left = LATE_STEPS
            tell(
                logger,
                "an allocator has given memory back within a step, which makes its host wait: the next %d steps run by the "
                "order for one hardware queue; leave more memory free",
                LATE_STEPS,
            )

    @contextmanager
    def watched(self, pipeline: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
        """Within a ``with`` block, note whether the allocator of this rank gives memory back to its device."""
        if not can_make_hosts_wait(device):
            yield
            return
        before = times_memory_was_given_back(device)
        yield
        self._memory[pipeline].returned |= times_memory_was_given_back(device) > before

    def ended(self, kind: LaunchKind) -> None:
        """Count a step of this kind as run."""
        self._seen[kind] += 1
        memory = self._memory[kind.pipeline]
        memory.steps += 1
        memory.steps_left = max(0, memory.steps_left - 1)


# Bytes of the weights that a rank holds, for all its stages, replicas and versions.


class WeightBytes(NamedTuple):
    """Bytes of the parameters on one rank, without gradients and optimizer states."""

    of_stages: Mapping[int, int]  # bytes of one version of every stage of the rank, by stage
    counted: int  # bytes of all versions and replicas, counted
    planned_versions: int
    versions: int  # the most at once


def count_weights(chunks: Sequence[torch.nn.Module], stages: Sequence[int]) -> WeightBytes:
    """Return the bytes of the parameters of this rank's chunks, which have one version. ``stages`` are their stages."""
    numbered = zip(stages, chunks, strict=True)
    of_stages = {stage: sum(parameter.nbytes for parameter in chunk.parameters()) for stage, chunk in numbered}
    return WeightBytes(of_stages, sum(of_stages.values()), 1, 1)


def predict_weights(placement: Placement, device: int, bytes_of: Mapping[int, int], versions: int = 1) -> int:
    """Return the bytes of weights that a device holds by the placement and the number of weight versions.

    ``bytes_of`` has the bytes of each stage of the model's first replica.
    """
    return versions * sum(bytes_of[stage % placement.model_stages] for stage in placement.stages[device])


@dataclass
class Observation:
    """The measurements of one step on this rank: activation bytes, times, offload statistics and weight bytes."""

    ledger: ActivationLedger | None  # counts bytes, if wanted
    trace: Trace | None  # times actions, if wanted
    offload: Callable[[], OffloadStatistics | None] = lambda: None  # reads the statistics of the step's offload
    weights: WeightBytes | None = None
    layers: Mapping[int, int] = field(default_factory=dict)  # their number, by stage of the rank
    bytes_of_message: Callable[[Action], int] | None = None  # by send; ``None`` if unknown
    opened_bytes: int | None = None  # see ``Pipeline``
    allocated: int | None = None  # bytes of PyTorch's allocator at the start of the step; ``None`` on a CPU

    @property
    def clock(self) -> Trace:
        """The trace of a step whose actions are timed."""
        assert self.trace is not None, "times are not measured"
        return self.trace

    @property
    def counter(self) -> ActivationLedger:
        """The ledger of a step whose bytes are counted."""
        assert self.ledger is not None, "bytes are not counted"
        return self.ledger


def observe(
    chunks: list[torch.nn.Module],
    permanent: Iterable[torch.Tensor] | None = None,
    count: bool = True,
    time: bool = True,
    earlier: ActivationLedger | None = None,
    tokens: Sequence[tuple[int, int]] | None = None,
) -> Observation:
    """Return a new ledger and a new trace, with which a step counts its activation bytes and times its actions.

    Without ``count`` there is no ledger, and without ``time`` no trace. If counting would break the training, the
    ledger counts nothing and is marked as failed. The new ledger starts with the bytes that the ledger ``earlier``
    still holds. ``permanent`` are the tensors that are not activations, by default ``permanent_tensors(chunks)``.
    ``tokens`` has ``(b, s)`` of every microbatch, if microbatches differ.
    """
    ledger = None
    if count:
        permanent = permanent_tensors(chunks) if permanent is None else permanent
        ledger = ActivationLedger(permanent, tokens) if earlier is None else earlier.continued(permanent)
        ledger.failure = ledger.failure or uncountable(chunks)
    if not time:
        return Observation(ledger, None)
    from megatron_pipemem.runtime.trace import Trace  # only here: most steps are not timed

    return Observation(ledger, Trace(device_of(chunks).type == "cuda"))


def permanent_tensors(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the tensors of chunks that are not activations: parameters, gradient buffers and module buffers."""
    permanent: list[torch.Tensor] = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            permanent += [parameter, *(g for g in (getattr(parameter, "main_grad", None),) if g is not None)]
        # DDP shadows nn.Module.buffers() by an attribute of its own.
        permanent += torch.nn.Module.buffers(chunk)
    return permanent


def device_of(chunks: list[torch.nn.Module]) -> torch.device:
    """Return the device of the model's first parameter on this rank; the CPU if there is no parameter."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


class TentativeStart(Protocol):
    """The first actions of a step, which run before it is known whether they must be undone.

    For example, a step without a barrier starts with forwards before the previous step's gradient norm is known.
    """

    length: int  # number of actions of this rank
    drain: Order  # messages that this rank posts if the actions are undone, so that none stays in flight

    def is_confirmed(self) -> bool:
        """Return whether the step goes on, the same on every rank. It is called once, after the first actions."""

    def start_over(self) -> None:
        """Undo everything that the first actions have changed, except messages."""


class FullMicrobatch(NamedTuple):
    """The size of a full microbatch. The weight of a shorter microbatch is a fraction of it."""

    sequences: int
    length: int  # tokens of a sequence on all context-parallel ranks together


class OverlapStatistics(NamedTuple):
    """Statistics, on one rank, of steps that begin before the previous step has ended on all ranks."""

    steps_ahead: int = 0  # optimizer steps taken before the gradient norm was known
    steps_taken_back: int = 0  # those of them that were undone, because their gradients might need clipping
    rollback_bytes: int = 0  # of the state that is kept to take a step back
    waiting_gradient_bytes: int = 0  # of gradients that wait for their step while the next batch adds up its own


@dataclass
class Step:
    """The data of one call of the forward-backward function.

    Fields without a default are known at the start. The others are set while the step is prepared and runs.
    """

    context: StepContext
    chunks: list[torch.nn.Module]
    groups: ProcessGroupCollection
    pipeline: Pipeline
    shape: Shape  # the properties that its schedule depends on
    message: MessageFormat  # format of the tensors between stages
    # shape of a message for the ``(b, s)`` of its microbatch; ``None`` if it does not follow from them
    message_shape: Callable[[int, int], tuple[int, ...]] | None
    # ``(b, s)`` of every microbatch on this context-parallel rank; ``None`` if only the batches show them
    tokens: Sequence[tuple[int, int]] | None
    program_store: ProgramStore
    # sums up all gradients of this rank; divides them by the number of tokens, if one is given
    finalize: Callable[[torch.Tensor | None], None]
    # one data iterator per chunk that Megatron sees; extensions may replace them
    iterators: list[Iterator | None]
    finalizes: bool  # whether gradients are finalized after the step
    full_microbatch: FullMicrobatch
    launches: LaunchOrders  # the steps that launch a kernel for the first time

    program: Program = field(init=False)
    plan: Choice | None = field(init=False)  # of the program; evaluation has none
    # of this step alone, if it was planned for its own microbatches; ``plan`` is then that of the other steps
    own_plan: Choice | None = None

    # Set by extensions before anything runs.
    # ``(first token, end)`` of each part of a microbatch, on this context-parallel rank; ``None`` for whole microbatches
    bounds: Sequence[tuple[int, int]] | None = None
    counts_bytes: bool = False  # whether an extension needs the bytes that are held
    times_actions: bool = False  # whether an extension needs the times of actions
    buffers: list[torch.Tensor] = field(default_factory=list)  # permanent tensors in addition to those of the chunks
    # besides the ledger's, functions that exclude the tensors of the batch
    excludes: list[Exclude] = field(default_factory=list)
    # whether microbatches stay in flight after the step, so that a later step depends on this one
    leaves_in_flight: bool = False
    # ledger of the previous step, if this step starts with activations that the previous one left
    earlier_ledger: ActivationLedger | None = None
    # Returns a function that reads the statistics of the step's offload. It may wait for the device: call it a step
    # later.
    offload_statistics: Callable[[], Callable[[], OffloadStatistics | None]] = lambda: lambda: None
    weight_bytes: Callable[[], WeightBytes | None] = lambda: None  # counts the parameters on this rank
    overlap: Callable[[], OverlapStatistics] = OverlapStatistics  # returns the statistics of steps without a barrier
    recorded_program: Program | None = None  # with which a report compares the counted bytes; by default the program
    overlaps: bool = False  # whether ranks begin and end the step without waiting for each other
    tentative_start: TentativeStart | None = None  # the first actions, if they may have to run again

    replays_passes: bool = False  # whether passes are captured or replayed as CUDA graphs, so Python sees no gradient

    observation: Observation = field(init=False)
    stages: dict[int, ChunkStage] = field(init=False)
    executor: Executor = field(init=False)

    @property
    def planned(self) -> Choice:
        """The choice of the schedule of a training step."""
        assert self.plan is not None, "evaluation has no plan"
        return self.plan

    @property
    def all_excludes(self) -> list[Exclude]:
        """The functions that exclude tensors from all that counts or moves activations."""
        ledger = self.observation.ledger
        return [*self.excludes] if ledger is None else [ledger.exclude, *self.excludes]

    @property
    def forward_only(self) -> bool:
        """Whether the step only evaluates."""
        return self.context.forward_only

    @cached_property
    def single_queue(self) -> bool:
        """Whether the step runs by the order for one hardware queue per rank.

        A new plan can change the value, so read it after the run has planned again.
        """
        return self.launches.is_single_queue(self.program_store.queues, self.launch_kind)

    @property
    def launch_kind(self) -> LaunchKind:
        """The key under which steps that launch the same kernels are counted."""
        context = self.context
        kind = context.forward_only, context.collect_non_loss_data
        return LaunchKind(*kind, self.shape, self.message.shape, self.program_store.renewals, self.pipeline.group)

    @cached_property
    def permanent(self) -> list[torch.Tensor]:
        """The tensors that are not activations. Read it when ``buffers`` is complete."""
        return [*permanent_tensors(self.chunks), *self.buffers]


class Extension(Feature):
    """A feature's part in the steps of a run: subclass it and override the methods that the feature needs.

    Example: run the actions of a new kind (``features.register_feature`` adds the extension to runs).

        class Counts(Extension):
            def extend_executor(self, step):
                return [self]

            def extend(self, executor):
                return {Kind.COUNT: lambda instruction: print(instruction.action)}

    The methods from ``choose`` to ``after`` are called in this order at every step, on every rank, and each of them for
    all extensions in the order of the table in ``mcore.plugin``. A method that opens communicators or sends can rely on
    every rank of the job to call it.
    """

    only_trains = False
    """Whether the methods are called in training steps only."""

    def choose(self, step: Step) -> Compiled | None:
        """Return the program for this step, or ``None`` for that of the run (``Programs.get``). It is called first.

        If several extensions return a program, the last of them counts.
        """

    def prepare(self, step: Step) -> None:
        """Set fields of the step. It is called when the program is known and before any action runs."""

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Return objects that add handlers of actions. It is called when the stages and the ledger exist.

        It is called a second time if its ``tentative_start`` is undone.
        """
        return ()

    def around(self, step: Step) -> AbstractContextManager:
        """Return a context manager that is entered while the executor runs the step's actions."""
        return nullcontext()

    def before_finalize(self, step: Step) -> None:
        """Finish the feature's work of the step. It is called after the last action, before gradients are finalized."""

    def after(self, step: Step) -> None:
        """Read results of the step. It is called after gradients are finalized."""

    def wait_for_overlapped_steps(self) -> None:
        """Complete pending updates of the weights, between two steps. Every rank calls this at the same time."""

    def close(self, orderly: bool) -> None:
        """Release everything that the extension keeps for the next step.

        ``orderly`` is false if the last step failed. Other ranks may then be gone, so do not wait for them.
        """
