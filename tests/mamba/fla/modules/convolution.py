"""The convolution in front of a gated delta net."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F

from fla import by_sequence


def causal_conv1d(x, weight, bias=None, activation=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """Convolve ``x`` (batch, tokens, channels), every channel by its own row of ``weight`` (channels, tokens that it sees)."""
    assert activation == "silu" and initial_state is None and not output_final_state
    convolve = partial(_convolve, weight, bias)
    return (convolve(x) if cu_seqlens is None else by_sequence(convolve, cu_seqlens, x)), None


def _convolve(weight, bias, x):
    width, seen = weight.shape
    convolved = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=seen - 1, groups=width)
    return F.silu(convolved[..., : x.shape[1]].transpose(1, 2))
