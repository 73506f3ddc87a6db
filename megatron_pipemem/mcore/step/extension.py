"""Describe one step as it stands, and what features add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pipemem.choose.knowledge import Choice, Shape
from megatron_pipemem.mcore.model.stages import ActivationCounter, ChunkStage, StepContext
from megatron_pipemem.mcore.model.weight_memory import WeightBytes
from megatron_pipemem.mcore.patching import Feature
from megatron_pipemem.mcore.programs import Compiled, Programs
from megatron_pipemem.mcore.step.observation import Observation, permanent_tensors
from megatron_pipemem.mcore.step.queues import LaunchKind, LaunchOrders
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.executor import Executor, StepFeature
from megatron_pipemem.runtime.host_traffic import OffloadStatistics
from megatron_pipemem.runtime.transport import MessageFormat, Pipeline
from megatron_pipemem.schedule.schedule import Order, Program


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
