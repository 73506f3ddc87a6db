"""Draw batches of documents with the lengths of public data sets, cut them into microbatches, and weigh these.

Publications give percentiles and means of lengths rather than fits. The log-normals through them are ours, as noted below.
Documents longer than the context are drawn again, because data loaders leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.prices import MicrobatchFactors

HIDDEN_SIZE = 4096
"""Hidden size of the model whose FLOPs weigh microbatches: 12 h^2 parameters a layer, about those of a 7B model."""

Batch = list[list[int]]
"""The tokens of every document of every microbatch, in arrival order."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of document lengths."""

    draw: Callable[[Random], float]  # returns the tokens of one document
    context: int  # most tokens of a document, and of a microbatch with several
    what: str  # description in a few words

    def documents(self, count: int, random: Random) -> list[int]:
        """Return so many documents that fit the context."""
        lengths: list[int] = []
        while len(lengths) < count:
            tokens = round(self.draw(random))
            if 0 < tokens <= self.context:
                lengths.append(tokens)
        return lengths

    def batch(self, microbatches: int, random: Random, packed: bool) -> Batch:
        """Return microbatches of one document each or, if packed, of as many as fit the context, in arrival order."""
        if not packed:
            return [[tokens] for tokens in self.documents(microbatches, random)]
        batch: Batch = [[]]
        while True:
            (tokens,) = self.documents(1, random)
            if sum(batch[-1]) + tokens > self.context:
                if len(batch) == microbatches:
                    return batch
                batch.append([])
            batch[-1].append(tokens)


def _long(random: Random) -> float:
    if random.random() < 1 / 8:
        return 8192 * 8 ** random.random()
    return random.lognormvariate(math.log(1000) - 0.5, 1.0)


DISTRIBUTIONS = {
    # OpenR1-Math-220k, from the card of a subset of 45,000 samples: characters at the median 12,980, at 90 % 32,888, at 99 %
    # 50,593, at most 60,000 (huggingface.co/datasets/96kevinli29/SFT-Math-45k). Its samples have up to 16k tokens, 3.7
    # characters each. The log-normal goes through the first two: median 3,500, sigma ln(32888 / 12980) / 1.28.
    "sft": Lengths(lambda random: random.lognormvariate(math.log(3500), 0.725), 16384, "reasoning SFT, OpenR1-Math"),
    # Short instructions mixed with long documents, as in LongAlign (arXiv 2401.18058): long ones of 8k to 64k tokens, here even
    # in their logarithm. Llama 3's short samples have 1k tokens on average (quoted in arXiv 2505.19609). Their spread, and the
    # share of one long document in eight, are ours.
    "long-sft": Lengths(_long, 65536, "long-context SFT, LongAlign"),
    # Responses of reasoning RL: "approximately log-normal", median 500, 99 % below 5,000: sigma ln(10) / 2.33
    # (jiahuanglin.xyz/all_lessons/RL/lessons/22b_longtail_rollouts.html); no paper with a fit of its own trace was found.
    "rl": Lengths(lambda random: random.lognormvariate(math.log(500), 0.99), 8192, "responses of reasoning RL"),
}


def weigh(batch: Batch, microbatches: int | None = None) -> MicrobatchFactors:
    """Return weights by FLOPs. 1.0 for F and for memory is the average over ``microbatches``, by default the batch's number.

    In a layer, a token's matrix products take 24 h^2 FLOPs forward, and the same for each gradient. Causal attention of a
    document of ``s`` tokens takes ``2 s^2 h`` forward, and twice that backward, all for gradients of inputs. Memory is in
    proportion to tokens.
    """
    tokens = [sum(documents) for documents in batch]
    attention = [sum(s * s for s in documents) / (12 * HIDDEN_SIZE) for documents in batch]
    forward = [linear + more for linear, more in zip(tokens, attention, strict=True)]
    inputs = [linear + 2 * more for linear, more in zip(tokens, attention, strict=True)]
    count = microbatches or len(batch)
    unit, memory = sum(forward) / count, sum(tokens) / count
    time: dict[Kind, Sequence[float]] = {Kind.F: forward, Kind.I: inputs, Kind.W: tokens}
    kinds = {kind: tuple(duration / unit for duration in seconds) for kind, seconds in time.items()}
    return MicrobatchFactors(kinds[Kind.F], tuple(token / memory for token in tokens), kinds)


def first_fit_decreasing(batch: Batch) -> Batch:
    """Return the same documents, longest first, each in the first microbatch with room below the largest one's tokens.

    There are at most as many microbatches as before, and fewer if the documents fit them.
    """
    room = max(map(sum, batch))
    packed: Batch = []
    for tokens in sorted((document for documents in batch for document in documents), reverse=True):
        bin_with_room = next((documents for documents in packed if sum(documents) + tokens <= room), None)
        if bin_with_room is None:
            packed.append(bin_with_room := [])
        bin_with_room.append(tokens)
    return packed


def imbalanced(microbatches: int, random: Random) -> MicrobatchFactors:
    """Return weights as from uneven routing to experts: with equal tokens, all passes take 1 to 2 times as long.

    No published parameters were found, so the range is ours. Memory is equal.
    """
    return MicrobatchFactors(tuple(1 + random.random() ** 2 for _ in range(microbatches)))
