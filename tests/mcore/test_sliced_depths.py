"""Further tokens in slices: the part that a slice gets of whole sequences, which are rolled to the left."""

from __future__ import annotations

import pytest
import torch

from megatron_pipemem.features.slices.megatron.depths import SlicedDepths
from megatron_pipemem.features.slices.runtime import SequenceState, SlicePart


def roll_tensor(tensor, shifts, dims, packed_seq_params):
    rolled = tensor.roll(shifts, dims)
    return rolled, rolled.sum()


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_slice_keeps_no_more_than_its_own_tokens(sequences: int):
    """Otherwise whole sequences would stay until the next forward, and no action would free what it took."""
    tokens = torch.arange(8 * sequences).view(sequences, 8)
    depths, part = SlicedDepths(torch.nn.Module()), SlicePart(1, 2, 5, SequenceState(8, lambda tensor: None))
    mask = depths.start({"input_ids": tokens}, part)
    assert mask.sum() == tokens.numel()
    depths.begin_layer()
    rolled, _ = depths.roll(roll_tensor, tokens[:, 2:5], part)
    assert torch.equal(rolled, tokens[:, 3:6])
    for tensor in (mask, rolled):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
