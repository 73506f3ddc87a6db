"""Describe one step as it stands, and the extensions by which features add to it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pipemem.choose.knowledge import Choice, Shape
from megatron_pipemem.mcore.model.stages import ActivationCounter, ChunkStage, StepContext
from megatron_pipemem.mcore.model.transformer_engine import uncountable
from megatron_pipemem.mcore.patching import Feature
from megatron_pipemem.mcore.programs import Compiled, Programs
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.executor import Executor, StepFeature
from megatron_pipemem.runtime.host_traffic import OffloadStatistics
from megatron_pipemem.runtime.trace import Trace
from megatron_pipemem.runtime.transport import MessageFormat, Pipeline
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Program

# Decide which steps run by the order for one hardware queue per rank.
#
# In such an order a message stands at one place for both ends, so it ends even if every host waits for its device after every
# launch. Hosts do so on a GPU when something is launched for the first time: CUDA loads a kernel then, and loading waits for
# all that runs, posted messages included. Later launches do not wait, and the usual order hides messages behind computing.


FIRST_STEPS = 2
"""The second one adds to gradients that are there, which takes other kernels."""

_ONE_QUEUE = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "NCCL_LAUNCH_ORDER_IMPLICIT")
"""With the value 1 they put all launches of a rank, or all of its messages, into one order. Megatron asks for one connection
with tensor or context parallelism before Blackwell."""
_SANITIZER = "NV_SANITIZER_INJECTION"
"""The start of the variables that compute-sanitizer sets in the process that it watches. Its hosts wait for every kernel."""


def has_single_queue(device: torch.device) -> bool:
    """Return whether every step on this device needs the order for one hardware queue.

    Args:
        device: where the model is.
    """
    if device.type != "cuda":
        return False
    return any(os.environ.get(name) == "1" for name in _ONE_QUEUE) or any(n.startswith(_SANITIZER) for n in os.environ)


def waits_at_first_launch(device: torch.device) -> bool:
    """Return whether a host may wait for this device when it launches something for the first time."""
    return device.type == "cuda"


class LaunchKind(NamedTuple):
    """Tell apart steps that launch other kernels.

    Args:
        forward_only: whether the step evaluates.
        logits: whether it is asked for something else than losses.
        shape: of the step.
        message: shape of the messages; ``None`` if it differs between microbatches.
        renewals: how often training has been planned anew before the step.
    """

    forward_only: bool
    logits: bool
    shape: Shape
    message: tuple[int, ...] | None
    renewals: int


class LaunchOrders:
    """Know which steps launch something new.

    Args:
        forced: whether all steps run by the order for one hardware queue, on every device.
    """

    def __init__(self, forced: bool = False) -> None:
        self._forced = forced
        self._seen: Counter[LaunchKind] = Counter()

    def queues(self, device: torch.device) -> tuple[bool, ...]:
        """Return the orders that a run on this device needs, each as whether it is for one hardware queue. The usual one comes
        first.
        """
        if self._forced or has_single_queue(device):
            return (True,)
        return (False, True) if waits_at_first_launch(device) else (False,)

    def of(self, queues: tuple[bool, ...], kind: LaunchKind) -> bool:
        """Return whether a step runs by the order for one hardware queue, alike on all ranks of its pipeline.

        Args:
            queues: the orders that its programs have.
            kind: of the step.
        """
        if len(queues) == 1:
            return queues[0]
        # Where lengths differ, every step may bring a new one, and with it new kernels.
        return kind.message is None or self._seen[kind] < FIRST_STEPS

    def ended(self, kind: LaunchKind) -> None:
        """Take note of a step that has run."""
        self._seen[kind] += 1


# Bytes of the weights that a rank holds: of all its stages, replicas of the model and versions.


class WeightBytes(NamedTuple):
    """Hold the bytes of the parameters on one rank, gradients and optimizer not included."""

    of_stages: Mapping[int, int]
    """bytes of one version of every stage that the rank holds"""
    counted: int
    """bytes of all versions and replicas, as they are there"""
    planned_versions: int
    versions: int
    """how many there have been at once"""


def count_weights(chunks: Sequence[torch.nn.Module], stages: Sequence[int]) -> WeightBytes:
    """Count the bytes of chunks with one version of their parameters.

    Args:
        chunks: of this rank.
        stages: their numbers.
    """
    numbered = zip(stages, chunks, strict=True)
    of_stages = {stage: sum(parameter.nbytes for parameter in chunk.parameters()) for stage, chunk in numbered}
    return WeightBytes(of_stages, sum(of_stages.values()), 1, 1)


def predict_weights(placement: Placement, device: int, bytes_of: Mapping[int, int], versions: int = 1) -> int:
    """Return the bytes of a device's weights as its schedule says.

    Args:
        placement: of the schedule.
        device: whose.
        bytes_of: parameters of every stage of the first replica of the model, wherever it is.
        versions: of every stage that the device holds.
    """
    return versions * sum(bytes_of[stage % placement.model_stages] for stage in placement.stages[device])


@dataclass
class Observation:
    """Hold what watches one step on this rank, and what it has seen of offload and weights.

    Args:
        ledger: counts bytes; ``None`` does not.
        trace: times actions; ``None`` does not.
        offload: reads what the step's offload moved and held, if there is any.
        weights: bytes of the parameters.
        layers: of every stage of the rank.
    """

    ledger: ActivationLedger | None
    trace: Trace | None
    offload: Callable[[], OffloadStatistics | None] = lambda: None
    weights: WeightBytes | None = None
    layers: Mapping[int, int] = field(default_factory=dict)

    @property
    def clock(self) -> Trace:
        """The trace, of a step whose actions are timed."""
        assert self.trace is not None, "nobody asked for times"
        return self.trace

    @property
    def counter(self) -> ActivationLedger:
        """The ledger, of a step whose bytes are counted."""
        assert self.ledger is not None, "nobody asked for bytes"
        return self.ledger

    @property
    def on_device(self) -> Callable[[torch.Tensor], object] | None:
        """For an offload engine: how it tells the ledger what takes device memory."""
        return None if self.ledger is None else self.ledger.hold


def observe(
    chunks: list[torch.nn.Module],
    permanent: Iterable[torch.Tensor] | None = None,
    count: bool = True,
    time: bool = True,
    earlier: ActivationLedger | None = None,
    tokens: Sequence[tuple[int, int]] | None = None,
) -> Observation:
    """Begin to watch a step.

    Args:
        chunks: of this rank.
        permanent: what is no activation; by default ``permanent_tensors(chunks)``.
        count: whether bytes are to be counted. Where that would break the training, the ledger has failed from the start.
        time: whether actions are to be timed.
        earlier: the ledger of the step before, to count on from what it still holds.
        tokens: ``(b, s)`` of every microbatch, where they differ.
    """
    ledger = None
    if count:
        permanent = permanent_tensors(chunks) if permanent is None else permanent
        ledger = ActivationLedger(permanent, tokens) if earlier is None else earlier.continued(permanent)
        ledger.failure = ledger.failure or uncountable(chunks)
    trace = Trace(device_of(chunks).type == "cuda") if time else None
    return Observation(ledger, trace)


def permanent_tensors(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Return what these chunks hold that is no activation: parameters, gradient buffers, module buffers."""
    permanent: list[torch.Tensor] = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            permanent += [parameter, *(g for g in (getattr(parameter, "main_grad", None),) if g is not None)]
        # DDP shadows nn.Module.buffers() by an attribute of its own.
        permanent += torch.nn.Module.buffers(chunk)
    return permanent


def device_of(chunks: list[torch.nn.Module]) -> torch.device:
    """Return where the model is; a rank without parameters has the host alone."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


class Trial(Protocol):
    """The first actions of a step, which may turn out to be in vain. They keep nothing that cannot be dropped.

    Attributes:
        length: of this rank's actions, how many.
        drain: messages that this rank posts when they are dropped, so that none stays in flight.
    """

    length: int
    drain: Order

    def stands(self) -> bool:
        """Return whether the step may go on, on every rank alike. Asked once, behind these actions."""

    def start_over(self) -> None:
        """Put everything back that these actions have changed, the messages aside."""


class FullMicrobatch(NamedTuple):
    """Give the size of a full microbatch: weights of microbatches are relative to it.

    Args:
        sequences: of a microbatch.
        length: tokens of a sequence, of all context-parallel ranks.
    """

    sequences: int
    length: int


class Overlap(NamedTuple):
    """Hold what steps without a barrier between them have come to on a rank."""

    steps_ahead: int = 0
    """optimizer steps that were taken before the gradient norm was known"""
    steps_taken_back: int = 0
    """of these, those whose gradients had to be clipped"""
    rollback_bytes: int = 0
    """of the state that a step may be taken back to"""
    waiting_gradient_bytes: int = 0
    """of the gradients that wait for their step while the next batch adds up its own"""


@dataclass
class Step:
    """One call of the forward-backward function. What has no default is known from the start; the rest comes on the way.

    Args:
        context: what the rank's chunks share.
        chunks: of this rank.
        groups: Megatron's process groups.
        pipeline: that runs it.
        shape: what its schedule depends on.
        message: what stages send to each other.
        message_shape: returns the shape of a microbatch's messages from its ``(b, s)``; ``None`` where they do not follow from
            them.
        tokens: ``(b, s)`` of every microbatch on this context-parallel rank; ``None`` where only the batches know.
        programs: has the program, unless an extension has one.
        finalize: sums up all gradients of this rank, with the number of tokens if they are to be divided by it.
        iterators: one data iterator per chunk. Extensions may put others in their places.
        finalizes: whether gradients are finalized behind the step.
        full_microbatch: sequences of a microbatch and tokens of a sequence, as the caller says, of all context-parallel ranks.
        launches: knows which steps launch something for the first time.
    """

    context: StepContext
    chunks: list[torch.nn.Module]
    groups: ProcessGroupCollection
    pipeline: Pipeline
    shape: Shape
    message: MessageFormat
    message_shape: Callable[[int, int], tuple[int, ...]] | None
    tokens: Sequence[tuple[int, int]] | None
    programs: Programs
    finalize: Callable[[torch.Tensor | None], None]
    iterators: list[Iterator | None]
    finalizes: bool
    full_microbatch: FullMicrobatch
    launches: LaunchOrders

    program: Program = field(init=False)
    plan: Choice | None = field(init=False)
    """what the program was planned as; evaluation has none"""
    own_plan: Choice | None = None
    """of this step alone, where it was planned for its own microbatches; ``plan`` is then what it began with"""

    # What extensions say before anything runs.
    counts_bytes: bool = False
    """whether somebody wants to know what is held"""
    times_actions: bool = False
    """whether somebody wants to know how long actions take"""
    buffers: list[torch.Tensor] = field(default_factory=list)
    """permanent tensors beside those of the chunks"""
    counters: list[ActivationCounter] = field(default_factory=list)
    """to be told which tensors are the batch; the ledger is told anyway"""
    leaves_in_flight: bool = False
    """whether microbatches stay in flight behind the step, so that a later one cannot be understood without this one"""
    earlier_ledger: ActivationLedger | None = None
    """of the step before, if this one begins with what that one still holds"""
    offload_statistics: Callable[[], Callable[[], OffloadStatistics | None]] = lambda: lambda: None
    """Return a function that reads what the step's offload moved and held. It may wait for the device: call it a step later."""
    weight_bytes: Callable[[], WeightBytes | None] = lambda: None
    """tells what the parameters on this rank take"""
    overlap: Callable[[], Overlap] = Overlap
    """tells what steps without a barrier between them have come to"""
    recorded_program: Program | None = None
    """what a report compares the counted bytes with; by default the program"""
    overlaps: bool = False
    """whether ranks begin and end the step without waiting for each other"""
    trial: Trial | None = None
    """what begins the step, if it may be in vain"""

    observation: Observation = field(init=False)
    stages: dict[int, ChunkStage] = field(init=False)
    executor: Executor = field(init=False)

    @property
    def planned(self) -> Choice:
        """The plan, of a step that trains."""
        assert self.plan is not None, "evaluation has no plan"
        return self.plan

    @property
    def forward_only(self) -> bool:
        """Whether the step evaluates, and trains nothing."""
        return self.context.forward_only

    @cached_property
    def single_queue(self) -> bool:
        """Return whether the step runs by the order for one hardware queue per rank.

        To be asked when it is known whether the run plans anew.
        """
        return self.launches.of(self.programs.queues, self.launch_kind)

    @property
    def launch_kind(self) -> LaunchKind:
        """Return the key of steps that launch the same kernels."""
        context = self.context
        kind = context.forward_only, context.collect_non_loss_data
        return LaunchKind(*kind, self.shape, self.message.shape, self.programs.renewals)

    @cached_property
    def permanent(self) -> list[torch.Tensor]:
        """Return what is no activation: to be asked for when all ``buffers`` are known."""
        return [*permanent_tensors(self.chunks), *self.buffers]


class Extension(Feature):
    """Define what a feature adds to steps. It is asked at these points of every step, in this order, on every rank
    alike.

    A method that opens communicators or sends may count on every rank of the job being there.
    """

    only_trains = False
    """Whether evaluation steps are none of its business."""

    def choose(self, step: Step) -> Compiled | None:
        """Before the program is chosen. Return the program of the step to choose it oneself."""

    def prepare(self, step: Step) -> None:
        """The program is known, and nothing has run: say what the step must take care of."""

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """The stages stand, and the ledger counts: return what extends the executor."""
        return ()

    def around(self, step: Step) -> AbstractContextManager:
        """Return what to run the executor in."""
        return nullcontext()

    def settle(self, step: Step) -> None:
        """All actions of this rank have run; gradients are not finalized."""

    def after(self, step: Step) -> None:
        """The step has ended."""

    def settle_now(self) -> None:
        """Leave no update of weights pending between steps. Every rank calls this at the same time."""

    def close(self, orderly: bool) -> None:
        """Forget what was kept for the next step.

        Args:
            orderly: whether the last step went well. If it failed, other ranks may be gone, and nothing may wait for them.
        """
