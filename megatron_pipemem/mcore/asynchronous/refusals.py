"""Refuses what asynchronous schedules do not run with."""

from __future__ import annotations

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.config.asynchronous_refusals import TIED, refused
from megatron_pipemem.errors import UnsupportedError


def check_asynchronous(config, chunks: list[torch.nn.Module], loop_updates: bool) -> None:
    """Raises:
    UnsupportedError: the configuration asks for something that needs one set of weights, or one update per step.
    """
    holders = [config, *(getattr(chunk, "ddp_config", None) for chunk in chunks)]
    reason = refused(lambda attribute: any(getattr(holder, attribute, None) for holder in holders), loop_updates)
    if reason is not None:
        raise UnsupportedError(reason)
    if loop_updates:
        return
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        if getattr(model, "share_embeddings_and_output_weights", False):
            raise UnsupportedError(TIED)
