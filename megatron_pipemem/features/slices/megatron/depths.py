"""Multi-token prediction in sequence slices: tensors that roll to the left take the next slice's first tokens at their end.

Hidden states are used at their own positions only, so no slice waits for a later one. Tokens, positions, labels and masks
of whole sequences are known to the stage. A loss is divided by the tokens of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.runtime import SlicePart

_OF_LAYER = ("input_ids", "position_ids")
"""The arguments that a layer of multi-token prediction rolls, in its order."""
_OF_LOSS = ("labels", "loss_mask")
"""The arguments that the losses of all depths roll, in their order."""


class SlicedDepths:
    """The arguments of a model chunk for whole sequences, and how far they have been rolled in the forward of a slice."""

    def __init__(self, model: torch.nn.Module):
        self.layers = [module for module in model.modules() if isinstance(module, MultiTokenPredictionLayer)]
        self._whole: dict[str, torch.Tensor] = {}
        self._packed: Any = None
        self._names: Iterator[str] = iter(())

    def start(self, passed: Mapping[str, Any], part: SlicePart) -> torch.Tensor | None:
        """Begin the forward of a slice with the model's arguments for whole sequences. Return the slice's loss mask.

        The mask is ``None`` if the model gets neither labels nor tokens. Its sum is that of the whole sequence's mask, by
        which Megatron weighs losses per token.
        """
        if passed.get("padding_mask") is not None:
            raise UnsupportedError(
                "slices-forward-step",
                "the forward step passes padding_mask to a model with multi-token prediction, and slices do not roll it; leave "
                "it out, or take a schedule without slices",
            )
        self._whole = {name: passed[name] for name in (*_OF_LAYER, *_OF_LOSS) if passed.get(name) is not None}
        self._packed, self._names = passed.get("packed_seq_params"), iter(())
        if "input_ids" not in self._whole:
            return None
        labels = self._whole.setdefault("labels", self._whole["input_ids"])
        whole = self._whole.setdefault("loss_mask", torch.ones_like(labels))
        return _with_sum(_cut(whole, part), whole.sum())

    def begin_layer(self, *_: object) -> None:
        self._names = iter([name for name in _OF_LAYER if name in self._whole])

    def roll(self, roll_tensor: Callable, tensor: torch.Tensor, part: SlicePart) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a slice of the result of Megatron's ``roll_tensor`` for the whole sequence, and the sum of that result."""
        name = next(self._names, None)
        if name is None:
            self._names = cycle(_OF_LOSS)
            name = next(self._names)
        whole = self._whole[name]
        assert tensor.shape == (whole.size(0), part.end - part.begin) and tensor.dtype == whole.dtype, name
        self._whole[name], total = roll_tensor(whole, shifts=-1, dims=-1, packed_seq_params=self._packed)
        rolled = _cut(self._whole[name], part)
        # Megatron weighs losses per token by the sum of a mask, which may be a rolled one.
        return _with_sum(rolled, total) if name == "loss_mask" else rolled, total

    def roll_all(
        self, roll_tensor: Callable, tensors: Sequence[torch.Tensor], fields: Sequence[str], part: SlicePart
    ) -> list[torch.Tensor]:
        """Return the same as ``roll`` of several tensors, as Megatron's ``dev`` rolls them. ``fields`` are their names."""

        def roll_one(whole: torch.Tensor, **place: Any) -> tuple[torch.Tensor, torch.Tensor]:
            (rolled,) = roll_tensor([whole], **place)
            return rolled, rolled.sum()

        # Labels that are derived from tokens have the name of the tokens.
        self._names = iter(_OF_LOSS if "loss_mask" in fields else fields)
        return [self.roll(roll_one, tensor, part)[0] for tensor in tensors]


def _cut(whole: torch.Tensor, part: SlicePart) -> torch.Tensor:
    """Return a slice of a tensor that is kept until the next forward. Autograd then keeps no more than the slice."""
    return whole[:, part.begin : part.end].clone(memory_format=torch.contiguous_format)


def _with_sum(mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Let ``mask.sum()`` return ``total``."""
    mask.sum = lambda: total  # type: ignore[assignment]
    return mask
