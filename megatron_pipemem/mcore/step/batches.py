"""Read the batches of a step before it runs, give them to the chunks, and agree on the shapes of messages."""

from __future__ import annotations

import logging
import random as python_random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy
import torch
from megatron.core.tensor_parallel import random

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import agreed_numbers
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.model.stages import (
    IteratorWrapper,
    StepContext,
    Tape,
    counted_before,
    needs_batches,
    shadowed,
)
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.schedule import Schedule

# Only the user's forward step knows the form of a batch. So it runs for every microbatch before the step, with a model that
# does not compute. When the stage runs, the samples that the forward step drew from the data iterator come from memory.
#
# The forward step must come to its end. If it left by an exception, a ``with`` block of the user around the call of the model
# would log or record a failure, and a timer or a range of a profiler would stay open. So the call returns a tensor of the
# real output's shape.


# Megatron's language models take these by position or by name.
_MODEL_ARGUMENTS = ("input_ids", "position_ids", "attention_mask", "decoder_input", "labels")


class Call(NamedTuple):
    """The tokens and labels that the forward step of one microbatch passes to the model; ``None`` if not passed."""

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    has_processor: bool  # whether a function of the forward step computes the model's output (output_processor)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(b, s)`` of the tokens, or ``(0, 0)`` if there are no tokens of two dimensions."""
        tokens = self.tokens
        return (tokens.size(0), tokens.size(1)) if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 else (0, 0)


class Rereadable(Tape):
    """A data iterator that keeps its samples. After ``rewind()`` it yields the kept samples again, then new ones."""

    def __next__(self):
        return next(self._iterator) if self._rewound and not self._seen else super().__next__()


def calls_of(
    step: StepContext, iterator: Iterator | None, model: torch.nn.Module, output_of: Callable[[Call], torch.Tensor]
) -> tuple[list[Call | None], Iterator | None]:
    """Run the forward step of every microbatch without its model, and return the tokens and labels of the calls.

    A call of the model returns ``output_of(call)`` and runs no hooks.

    Also return the iterator that the real forwards read, which yields the same data again. The entry of a microbatch is
    ``None`` if its forward step does not call the model. If the data cannot be read by ``next``, all entries are
    ``None`` and no forward step runs. The random state is restored.
    """
    if not (iterator is None or hasattr(iterator, "__next__")):
        return [None] * step.num_microbatches, iterator
    reread = None if iterator is None else Rereadable(iterator)
    seen: list[Call] = []

    def called(*arguments, **keywords) -> torch.Tensor:
        passed = keywords | dict(zip(_MODEL_ARGUMENTS, arguments, strict=False))
        # The other arguments are not kept, because an attention mask per microbatch would be large.
        has_processor = passed.get("output_processor") is not None
        seen.append(Call(passed.get("input_ids"), passed.get("labels"), has_processor))
        return output_of(seen[-1])

    hooks: dict[str, object] = {"_forward_pre_hooks": OrderedDict(), "_forward_hooks": OrderedDict()}
    calls: list[Call | None] = []
    with ExitStack() as stack:
        stack.enter_context(_random_numbers_kept())
        stack.enter_context(counted_before())
        stack.enter_context(torch.set_grad_enabled(not step.forward_only))
        for module in _wrapped(model):
            stack.enter_context(shadowed(module, {"forward": called, **hooks}))
        for _ in range(step.num_microbatches):
            seen.clear()
            try:
                with needs_batches(step.num_microbatches):
                    step.forward_step_func(reread, model)
            except Exception:
                # After the call, the cause may be the output without values. The real forward raises all other errors.
                if not seen:
                    raise
            calls.append(seen[0] if seen else None)
    if reread is not None:
        reread.rewind()
    return calls, reread


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the states of all random number generators after a ``with`` block, also of Python's and NumPy's."""
    states = python_random.getstate(), numpy.random.get_state()
    try:
        with random._fork_rng():
            yield
    finally:
        python_random.setstate(states[0])
        numpy.random.set_state(states[1])


def zeros_as_output(shape: Sequence[int], dtype: torch.dtype, device: torch.device | int) -> torch.Tensor:
    """Return zeros that have, like a model's output, an autograd node if gradients are enabled."""
    zero = torch.zeros((), dtype=dtype, device=device, requires_grad=torch.is_grad_enabled())
    return zero.expand(*shape).clone()


def output_to_send(step: Step, call: Call) -> torch.Tensor:
    """Return zeros of the shape that a stage other than the last sends for a microbatch, of one token if unknown."""
    shape = step.message.shape if step.message_shape is None else step.message_shape(*call.shape)
    return zeros_as_output(shape or (1, 1, 1), step.message.dtype, step.message.device)


def _wrapped(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a chunk and every module that it wraps, because the user's forward step may call any of these."""
    yield model
    inner = getattr(model, "module", None)
    while isinstance(inner, torch.nn.Module):
        yield inner
        inner = getattr(inner, "module", None)


# Dealing a stream of batches to two replicas of the model, or in another order.


class Dealer:
    """Reads the batches of one data iterator, and gives them to chunks in the order in which each chunk reads them.

    Megatron's iterator yields the batches of all replicas of the model. A rank may have the first stage of one replica
    and the last stage of the other, and then reads every batch once for both. ``iterator`` is ``None`` if the rank has no
    data iterator.
    """

    def __init__(self, iterator: Iterator | None, num_microbatches: int):
        self._iterator = iterator
        self._num_microbatches = num_microbatches
        self._read = 0
        self._waiting: dict[int, object] = {}

    def iterator_over(self, microbatches: Sequence[int]) -> Iterator | None:
        """Return an iterator over the batches of these microbatches, for one chunk; ``None`` without an iterator."""
        return None if self._iterator is None else _DealtIterator(self, self._iterator, microbatches)

    def all_batches(self) -> list[object]:
        """Return the batches of all microbatches of the step, and keep each until a chunk reads it.

        Raise an UnsupportedError if the data iterator ends before.
        """
        try:
            self._read_up_to(self._num_microbatches - 1)
        except StopIteration:
            raise UnsupportedError(
                "data-iterator",
                f"the data iterator ends after {self._read} of the step's {self._num_microbatches} microbatches; give one "
                "that yields a batch per microbatch",
            ) from None
        return [self._waiting[microbatch] for microbatch in range(self._num_microbatches)]

    def batch(self, microbatch: int) -> object:
        self._read_up_to(microbatch)
        return self._waiting.pop(microbatch)

    def _read_up_to(self, microbatch: int) -> None:
        while self._read <= microbatch:
            self._waiting[self._read] = self._next()
            self._read += 1

    def _next(self) -> object:
        assert self._iterator is not None, "only a dealer with an iterator reads"
        return next(self._iterator)

    def finish(self) -> None:
        """Read the remaining batches of the step if one was read, so that all such ranks are at the same batch."""
        if self._read:
            while self._read < self._num_microbatches:
                self._next()
                self._read += 1


class _DealtIterator(IteratorWrapper):
    def __init__(self, dealer: Dealer, iterator: Iterator, microbatches: Sequence[int]):
        super().__init__(iterator)
        self._dealer = dealer
        self._coming = deque(microbatches)

    def __next__(self):
        if not self._coming:
            raise UnsupportedError(
                "data-iterator",
                "the forward step asked for more than one batch per microbatch, and it is unknown which of them belong "
                "together; read all of a microbatch at once, or take a schedule with one replica of the model and no "
                "--pipemem-microbatch-costs",
            )
        return self._dealer.batch(self._coming.popleft())


def deal(iterator: Iterator | None, schedule: Schedule, device: int) -> tuple[Dealer, list[Iterator | None]]:
    """Return the dealer of a device's batches, and one iterator per chunk over the chunk's batches.

    The iterator of a chunk has the order of its forwards in the schedule. Without an iterator, the iterators are ``None``.
    """
    dealer = Dealer(iterator, schedule.num_microbatches)
    hands = [
        dealer.iterator_over([a.microbatch for a in schedule.orders[device] if a.kind is Kind.F and a.stage == stage])
        for stage in schedule.placement.stages[device]
    ]
    return dealer, hands


# If microbatches differ, the ranks of a pipeline agree on the shapes of all messages at the start of a step.
#
# The shape of a message follows from the tokens ``[b, s]`` that the first stage passes to its model. That stage sends the
# sizes of all microbatches to the others in one small message. Receives can then be posted ahead, as with equal microbatches.


logger = logging.getLogger(__name__)


class StepShapes(Extension):
    """Finds the shapes of messages in steps whose microbatches may differ in size; other steps stay unchanged."""

    def __init__(self, chunk_placement: ChunkPlacement):
        self._chunk_placement = chunk_placement
        self._kinds_without_tokens: set[tuple[bool, bool]] = set()
        """The kinds of steps whose calls of the model have no tokens ``[b, s]``."""

    def prepare(self, step: Step) -> None:
        """Set the message shapes of all microbatches by the sizes ``(b, s)`` that the rank of the first stage sends.

        A step whose messages all have known shapes stays unchanged. If a call of the model has no tokens ``[b, s]``,
        the shapes stay unknown, and the log says so.
        """
        kind = (step.forward_only, step.context.collect_non_loss_data)
        if step.message_shape is None or step.tokens is not None or kind in self._kinds_without_tokens:
            return
        count = 2 * step.context.num_microbatches
        numbers = agreed_numbers("sizes of microbatches", lambda: self._own(step), count, [step.pipeline.group])
        if not all(numbers):
            self._kinds_without_tokens.add(kind)
            tell(
                logger,
                "the forward step does not pass tokens [b, s] to the model, so every message carries its own shape",
                level=logging.WARNING,
            )
            return
        sizes = list(map(int, numbers))  # b and s of each microbatch in turn
        step.tokens = list(zip(sizes[::2], sizes[1::2], strict=True))
        step.message = replace(step.message, shapes=[step.message_shape(b, s) for b, s in step.tokens])

    def _own(self, step: Step) -> list[int] | None:
        """Return ``b`` and ``s`` of every microbatch in one list; ``None`` if this rank does not hold the first stage.

        A microbatch whose call of the model has no tokens ``[b, s]`` gets two zeros. The data iterator of the step is
        replaced, so that the real forwards read the same data again.
        """
        if 0 not in step.pipeline.stages:
            return None
        chunk, context = step.pipeline.stages.index(0), step.context
        with self._chunk_placement.chunk(chunk):
            calls, reread = calls_of(context, step.iterators[chunk], step.chunks[chunk], partial(output_to_send, step))
        step.iterators = [reread if number == chunk else iterator for number, iterator in enumerate(step.iterators)]
        return [size for call in calls for size in ((0, 0) if call is None else call.shape)]
