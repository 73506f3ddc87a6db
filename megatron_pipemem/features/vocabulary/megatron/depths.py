"""Let the head that is cut over the pipeline predict several tokens: Megatron's multi-token prediction.

Megatron's last stage runs the head once per depth, and its loss after each. Here the inputs of all depths are one input of the
head, one behind the other, and the passes of the schedule give the losses of all depths. Then Megatron's own function weighs
and logs them, with losses in the place of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megatron_pipemem.features.vocabulary.megatron.layers import DepartingHead


def keep_depths(
    original: Callable, *, hidden_states: torch.Tensor, output_layer: torch.nn.Module, **others
) -> torch.Tensor:
    """Run in the place of ``process_mtp_loss``: before a cut head keep the outputs of all depths, and the original, for when
    losses are known.

    Args:
        original: Megatron's function.
        hidden_states: outputs of all depths.
        output_layer: the head.
        others: further arguments of Megatron's.
    """
    if not isinstance(output_layer, DepartingHead):
        return original(hidden_states=hidden_states, output_layer=output_layer, **others)
    if not output_layer.depths:  # evaluation asks for the next token only
        return hidden_states.chunk(1 + others["config"].mtp_num_layers)[0]
    output_layer.further = partial(weigh, original, others)
    return hidden_states


def weigh(process_mtp_loss: Callable, others: dict, losses: torch.Tensor, hits: torch.Tensor) -> torch.Tensor:
    """Return the losses of the next token, which bring those of all depths into the backward.

    Args:
        process_mtp_loss: Megatron's.
        others: what the model passed to it.
        losses: of the tokens of all depths, ``[(1 + depths) * s, b]``.
        hits: which of the labels are the likeliest tokens, in the same shape.

    Returns:
        ``[s, b]``.
    """
    # "Hidden states" of two numbers, which are their own logits: token 0 is the likeliest where the label is, and is every
    # label, so that Megatron counts as it does.
    other = torch.where(hits, -1.0, torch.inf)
    weighed = process_mtp_loss(
        **others
        | {
            "hidden_states": torch.stack((losses, other), dim=-1),
            "labels": torch.zeros_like(others["labels"]),
            "output_layer": lambda rows, **_: (rows, None),
            "output_weight": None,
            "runtime_gather_output": True,
            "compute_language_model_loss": lambda labels, logits: logits[..., 0].t(),
            "tp_group": None,
            "scale_logits_fn": None,
        }
    )
    return weighed[..., 0]
