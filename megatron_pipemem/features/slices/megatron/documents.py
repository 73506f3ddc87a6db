"""Cut packed documents (``thd``) into sequence slices.

A slice begins within at most one document. Its queries are those of its tokens. Its keys begin with that document's first
token, because earlier documents are not attended to:

    tokens      0 . . . 4 . . . 8 . . . 12        documents of 6 and 6 tokens, slices of 4
    slice 1             4 5 | 6 7                  queries: documents of 2 and 2 tokens
                0 1 2 3 4 5 | 6 7                  keys: documents of 6 and 2 tokens

So the queries of every document are its last ones, and the causal mask is aligned to the last query and the last key of
each (``padding_causal_bottom_right``).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate, pairwise
from typing import Any

import torch

from megatron_pipemem.errors import UnsupportedError


class SlicedDocuments:
    """The documents of one slice, from the token ``begin`` up to, but without, ``end``.

    ``packed`` are Megatron's ``PackedSeqParams`` of the whole sequence, which has that many ``tokens``.
    """

    def __init__(self, packed: Any, begin: int, end: int, tokens: int):
        used = packed.cu_seqlens_q.tolist()
        places = used if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.tolist()
        _check(packed, used, places, tokens)
        cut = [number for number, place in enumerate(pairwise(places)) if place[0] < end and place[1] > begin]
        firsts = [max(places[number], begin) for number in cut]
        ends = [min(places[number + 1], end) for number in cut]
        # The end of each document's tokens without its padding.
        used_ends = [min(places[number] + used[number + 1] - used[number], end) for number in cut]
        starts = [places[number] for number in cut]
        queries = [max(0, last - first) for last, first in zip(used_ends, firsts, strict=True)]
        keys = [max(0, last - start) for last, start in zip(used_ends, starts, strict=True)]
        self.since: int = starts[0]
        """the first token whose keys the slice needs"""
        self.longest: int = max(last - start for last, start in zip(ends, starts, strict=True))
        """the tokens, at most, from a document's first one to the slice's end"""

        def offsets(values: Sequence[int]) -> torch.Tensor:
            return packed.cu_seqlens_q.new_tensor(values)

        self.own, self.seen = copy(packed), copy(packed)
        """the documents as the model gets them, and as attention gets them with the keys of the whole sequence so far"""
        self.own.cu_seqlens_q = self.own.cu_seqlens_kv = offsets([*accumulate(queries, initial=0)])
        self.seen.cu_seqlens_q = self.own.cu_seqlens_q
        self.seen.cu_seqlens_kv = offsets([*accumulate(keys, initial=self.since)])
        if packed.cu_seqlens_q_padded is not None:
            self.own.cu_seqlens_q_padded = self.own.cu_seqlens_kv_padded = offsets(
                [0, *(last - begin for last in ends)]
            )
            self.seen.cu_seqlens_q_padded = self.own.cu_seqlens_q_padded
            self.seen.cu_seqlens_kv_padded = offsets([self.since, *ends])
        self.own.max_seqlen_q = self.own.max_seqlen_kv = self.seen.max_seqlen_q = max(queries)
        self.seen.max_seqlen_kv = max(keys)
        self.positions = torch.cat(
            [
                torch.arange(first - start, last - start, device=packed.cu_seqlens_q.device)
                for first, last, start in zip(firsts, ends, starts, strict=True)
            ]
        )
        """the position of every token of the slice within its document"""
        self.as_one = copy(packed)
        """the slice as one document, for tables with a row per token that context-parallel ranks share"""
        self.as_one.cu_seqlens_q = self.as_one.cu_seqlens_kv = offsets([0, end - begin])
        self.as_one.cu_seqlens_q_padded = self.as_one.cu_seqlens_kv_padded = None
        self.as_one.max_seqlen_q = self.as_one.max_seqlen_kv = end - begin


def _check(packed: Any, used: list[int], places: list[int], tokens: int) -> None:
    """Raise an UnsupportedError if packed documents are not those of a whole sequence's queries and keys."""
    keys = packed.cu_seqlens_kv if packed.cu_seqlens_kv_padded is None else packed.cu_seqlens_kv_padded
    is_causal = packed.cu_seqlens_kv.tolist() == used and keys.tolist() == places
    if (getattr(packed, "tokens_per_sample", None) or tokens) < tokens:
        raise UnsupportedError(
            "slices-forward-step",
            "the forward step passes tokens_per_sample, by which experts see several samples, and a slice has parts of them; "
            "leave it out, or take a schedule without slices",
        )
    if packed.qkv_format != "thd" or not is_causal or places[0] or places[-1] != tokens:
        raise UnsupportedError(
            "slices-forward-step",
            f"the forward step passes packed_seq_params of {packed.qkv_format} from {places[0]} to {places[-1]}, and sequence "
            f"slices need thd with documents of queries and keys from 0 to {tokens}; pad them, or take a schedule without "
            "slices",
        )
