"""Further tokens in slices: the part that a slice gets of whole sequences, which are rolled to the left."""

from __future__ import annotations

import pytest
import torch

from megatron_pipemem.features.slices.megatron.depths import SlicedDepths
from megatron_pipemem.features.slices.runtime import SequenceState, SlicePart


def roll_tensor(tensor, shifts, dims, packed_seq_params):
    rolled = tensor.roll(shifts, dims)
    return rolled, rolled.sum()


def roll_tensors(tensors, shifts, dims, packed_seq_params):
    return [tensor.roll(shifts, dims) for tensor in tensors]


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


PLACES, SHIFTED = torch.arange(8).view(1, 8), torch.arange(1, 9).view(1, 8)
PASSED = {"input_ids": 10 + PLACES, "position_ids": PLACES, "loss_mask": SHIFTED.float()}


@pytest.mark.parametrize("rolls_positions", [True, False])
def test_lists_are_rolled_by_their_names(rolls_positions: bool):
    """Megatron's ``dev`` rolls lists, without positions if there are no learned ones, and sums a mask that it gets back."""
    depths, part = SlicedDepths(torch.nn.Module()), SlicePart(1, 2, 5, SequenceState(8, lambda tensor: None))
    depths.start(PASSED, part)

    def rolled(*fields: str, of: tuple[str, ...]) -> list[torch.Tensor]:
        return depths.roll_all(roll_tensors, [PASSED[name][:, 2:5] for name in of], fields, part)

    fields = ("input_ids", "position_ids") if rolls_positions else ("input_ids",)
    for depth in (1, 2):
        for name, tensor in zip(fields, rolled(*fields, of=fields), strict=True):
            assert torch.equal(tensor, PASSED[name][:, 2 + depth : 5 + depth])
    # Without labels, labels are derived from tokens that no layer has rolled.
    for depth in (1, 2):
        tokens, mask = rolled("input_ids", "loss_mask", of=("input_ids", "loss_mask"))
        assert torch.equal(tokens, PASSED["input_ids"][:, 2 + depth : 5 + depth])
        assert torch.equal(mask, PASSED["loss_mask"][:, 2 + depth : 5 + depth])
        assert mask.sum() == 36
