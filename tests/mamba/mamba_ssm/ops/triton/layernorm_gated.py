"""The gated norm behind a scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """Normalise groups of channels by the root of their mean square, gated by ``silu(z)`` before or behind."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x, z=None):
        y = x.float()
        if z is not None and not self.norm_before_gate:
            y = y * F.silu(z.float())
        groups = y.unflatten(-1, (-1, self.group_size))
        y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight
        if z is not None and self.norm_before_gate:
            y = y * F.silu(z.float())
        return y.to(x.dtype)
