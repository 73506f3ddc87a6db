"""Transformer Engine's own Python on the CPU, over a stand-in for its compiled extension. Import this before the CPU lane.

Its layers, queues and optimizers run as NVIDIA wrote them; only what they call in ``transformer_engine_torch`` is computed by
PyTorch (``kernels``, and ``fp8`` with the newest version). The package alone is enough: its compiled parts are neither loaded
nor needed.
Attention is the unfused one, or flash attention of the stand-in in ``flash``.
"""

from __future__ import annotations

import os
import sys

import cuda_graphs
import torch
import torch.distributed

from te_stand_in import extension

_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # imports without the core library
    "NVTE_MASKED_SOFTMAX_FUSION": "0",
}


for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
sys.modules["transformer_engine_torch"] = extension.module()
cuda_graphs.install()

import transformer_engine.common  # noqa: E402

transformer_engine.common.load_framework_extension = lambda framework: None
# Transformer Engine's layers insist on it; nothing else of what runs here asks.
torch.Tensor.is_cuda = property(lambda tensor: True)


class _Message:
    """A message on its way, for which the ring of context-parallel ranks waits twice: gloo would block, NCCL does not."""

    def __init__(self, work: torch.distributed.Work):
        self._work: torch.distributed.Work | None = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


_exchange = torch.distributed.batch_isend_irecv
torch.distributed.batch_isend_irecv = lambda messages: [_Message(work) for work in _exchange(messages)]

_coalesced = torch.distributed._coalescing_manager


def _coalesced_by_gloo(group=None, device=None, async_ops=False):
    """Gloo coalesces collectives, and has nothing to begin on a device."""
    return _coalesced(group, None, async_ops)


torch.distributed._coalescing_manager = _coalesced_by_gloo
