"""Draw batches of documents as long as those of public data sets, cut them into microbatches, and weigh those.

What is published of lengths are percentiles and means rather than fits; a log-normal through them is ours, and says so below.
Documents longer than the context are drawn again, as data loaders leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.prices import MicrobatchWeights

HIDDEN_SIZE = 4096
"""Of the model whose FLOPs weigh microbatches: 12 h^2 parameters a layer, as a 7B model has about."""

Batch = list[list[int]]
"""The tokens of every document of every microbatch, in arrival order."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of document lengths.

    Args:
        draw: the tokens of one document.
        context: the most tokens of a document, and of a microbatch of several.
        what: it stands for, in a few words.
    """

    draw: Callable[[Random], float]
    context: int
    what: str

    def documents(self, count: int, random: Random) -> list[int]:
        """So many documents that fit the context."""
        found: list[int] = []
        while len(found) < count:
            tokens = round(self.draw(random))
            if 0 < tokens <= self.context:
                found.append(tokens)
        return found

    def batch(self, microbatches: int, random: Random, packed: bool) -> Batch:
        """One document per microbatch, or as many as fit the context, in the order in which they come."""
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
    # OpenR1-Math-220k, as the card of a cut of 45,000 of its samples gives them: characters at the median 12,980, at 90 %
    # 32,888, at 99 % 50,593, at most 60,000 (huggingface.co/datasets/96kevinli29/SFT-Math-45k). Its samples have up to
    # 16k tokens: 3.7 characters each. A log-normal through the first two: median 3,500, sigma ln(32888 / 12980) / 1.28.
    "sft": Lengths(lambda random: random.lognormvariate(math.log(3500), 0.725), 16384, "reasoning SFT, OpenR1-Math"),
    # Short instructions with long documents between, as LongAlign trains (arXiv 2401.18058: long ones of 8k to 64k tokens,
    # here evenly by their logarithm). Llama 3's short samples have 1k tokens on average (arXiv 2505.19609, which quotes
    # it); their spread, and that one in eight is long, is ours.
    "long-sft": Lengths(_long, 65536, "long-context SFT, LongAlign"),
    # Responses of reasoning RL: "approximately log-normal", median 500, 99 % below 5,000: sigma ln(10) / 2.33
    # (jiahuanglin.xyz/all_lessons/RL/lessons/22b_longtail_rollouts.html); no fit of a paper's own trace was found.
    "rl": Lengths(lambda random: random.lognormvariate(math.log(500), 0.99), 8192, "responses of reasoning RL"),
}


def weigh(batch: Batch, microbatches: int | None = None) -> MicrobatchWeights:
    """Weights by FLOPs: 1.0 for F, and for what is held, is the average over so many microbatches, by default the batch's.

    Of a layer, a token's matrix products take 24 h^2 FLOPs forward, and again for either gradient; causal attention of a
    document of ``s`` tokens takes ``2 s^2 h`` forward, and twice that backward, all of it for gradients of inputs. What is
    held goes by tokens.
    """
    tokens = [sum(documents) for documents in batch]
    attention = [sum(s * s for s in documents) / (12 * HIDDEN_SIZE) for documents in batch]
    forward = [linear + more for linear, more in zip(tokens, attention, strict=True)]
    inputs = [linear + 2 * more for linear, more in zip(tokens, attention, strict=True)]
    count = microbatches or len(batch)
    unit, memory = sum(forward) / count, sum(tokens) / count
    time: dict[Kind, Sequence[float]] = {Kind.F: forward, Kind.I: inputs, Kind.W: tokens}
    kinds = {kind: tuple(each / unit for each in seconds) for kind, seconds in time.items()}
    return MicrobatchWeights(kinds[Kind.F], tuple(each / memory for each in tokens), kinds)


def first_fit_decreasing(batch: Batch) -> Batch:
    """The same documents, the longest first, each in the first microbatch with room below the largest one's tokens.

    As many microbatches as there were, at most: fewer where the documents fit them.
    """
    room = max(map(sum, batch))
    packed: Batch = []
    for tokens in sorted((each for documents in batch for each in documents), reverse=True):
        found = next((documents for documents in packed if sum(documents) + tokens <= room), None)
        if found is None:
            packed.append(found := [])
        found.append(tokens)
    return packed


def imbalanced(microbatches: int, random: Random) -> MicrobatchWeights:
    """What uneven routing to experts does to microbatches of equally many tokens: everything takes 1 to 2 times as long.

    No published parameters were found; the range is ours. What is held is alike.
    """
    return MicrobatchWeights(tuple(1 + random.random() ** 2 for _ in range(microbatches)))
