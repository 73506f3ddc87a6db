"""Deal a stream of batches: to two replicas of the model, or in another order than they come in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model.stages import IteratorWrapper
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.schedule import Schedule


class Dealer:
    """Hands the microbatches of one data iterator to the chunks that read them, in whatever order they are asked for.

    The replicas of the model take turns, in an order of their own, with the batches that Megatron reads for the whole step. A
    rank that holds the first stage of one and the last stage of the other reads every batch of the step once.

    Args:
        stream: Megatron's iterator of this rank; ``None`` where batches come by other ways.
        num_microbatches: of the step.
    """

    def __init__(self, stream: Iterator | None, num_microbatches: int):
        self._stream = stream
        self._num_microbatches = num_microbatches
        self._read = 0
        self._waiting: dict[int, object] = {}

    def hand(self, microbatches: Sequence[int]) -> Iterator | None:
        """Return an iterator over the batches of these microbatches."""
        return None if self._stream is None else _Hand(self, self._stream, microbatches)

    def all(self) -> list[object]:
        """Return all batches of the step, which stay here for those who are to get them.

        Raises:
            UnsupportedError: there are fewer.
        """
        try:
            self._read_up_to(self._num_microbatches - 1)
        except StopIteration:
            raise UnsupportedError(
                "data-iterator",
                f"the data iterator ends behind {self._read} of the step's {self._num_microbatches} microbatches; give one "
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
        assert self._stream is not None, "who has no stream is not asked"
        return next(self._stream)

    def finish(self) -> None:
        """Read on to the end of the step, so that the next one begins behind it on every rank that reads."""
        if self._read:
            while self._read < self._num_microbatches:
                self._next()
                self._read += 1


class _Hand(IteratorWrapper):
    def __init__(self, dealer: Dealer, stream: Iterator, microbatches: Sequence[int]):
        super().__init__(stream)
        self._dealer = dealer
        self._coming = deque(microbatches)

    def __next__(self):
        if not self._coming:
            raise UnsupportedError(
                "data-iterator",
                "the forward step asked for more than one batch per microbatch, and then nobody can say which of them belong "
                "together; read all of a microbatch at once, or take a schedule with one replica of the model and no "
                "--pipemem-microbatch-costs",
            )
        return self._dealer.batch(self._coming.popleft())


def deal(stream: Iterator | None, schedule: Schedule, device: int) -> tuple[Dealer, list[Iterator | None]]:
    """Return who hands out the batches of a device, and one iterator per chunk.

    Args:
        stream: Megatron's iterator of this rank, or ``None``.
        schedule: says which microbatches every chunk runs, in which order.
        device: this rank's place in the pipeline.
    """
    dealer = Dealer(stream, schedule.num_microbatches)
    hands = [
        dealer.hand([a.microbatch for a in schedule.orders[device] if a.kind is Kind.F and a.stage == stage])
        for stage in schedule.placement.stages[device]
    ]
    return dealer, hands
