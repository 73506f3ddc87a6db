"""Keep the values that forwards add to the log of Megatron's training loop, so that repeated forwards count once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


class ForwardTraces:
    """Remembers the losses of experts and of multi-token prediction that have been counted so far."""

    def __init__(self) -> None:
        self._kept = {key: tensor.clone() for key, tensor in _counted()}

    def restore(self) -> None:
        """Drop the counts since the start."""
        for key, tensor in _counted():
            tensor.copy_(self._kept[key]) if key in self._kept else tensor.zero_()


def _counted() -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    for name, entry in get_moe_metrics_tracker().metrics.items():
        yield ("experts", name), entry.values
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, torch.Tensor):
            yield ("depths", name), value
