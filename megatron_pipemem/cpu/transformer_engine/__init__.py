"""Transformer Engine's own Python on the CPU, over a stand-in for its compiled extension.

Where the package ``transformer_engine`` can be imported, its layers, queues and optimizers run as NVIDIA wrote them; only
what they call in ``transformer_engine_torch`` is computed by PyTorch (``kernels``). The package alone is enough: its
compiled parts are neither loaded nor needed (``pip install --no-deps transformer_engine onnxscript onnx onnx_ir ml_dtypes
einops``). There is no fp8, and attention is the unfused one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch

_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # imports without the core library
    "NVTE_MASKED_SOFTMAX_FUSION": "0",
}


def install() -> None:
    """Let Transformer Engine be imported and run, where it is installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    from megatron_pipemem.cpu.transformer_engine import extension

    sys.modules["transformer_engine_torch"] = extension.module()

    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    # Transformer Engine's layers insist on it; nothing else of what runs here asks.
    tensors: Any = torch.Tensor
    tensors.is_cuda = property(lambda tensor: True)
