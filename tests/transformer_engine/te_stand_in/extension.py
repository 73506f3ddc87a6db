"""Build the module ``transformer_engine_torch`` as Transformer Engine's Python sees it.

What training in fp32, bf16 and fp16 calls is in ``kernels``. Every other name is there as well, because Transformer Engine
takes hundreds of them when it is imported: types answer with members on demand, functions raise when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from te_stand_in import formats, fp8, kernels, user_buffers

NAME = "transformer_engine_torch"


FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3", start=0
)
"""Positions in lists of quantizers."""


class _Type(type):
    """A class whose members are made when they are first asked for; good as keys, to compare, and to inherit from."""

    number: int

    def __getattr__(cls, name: str) -> _Type:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Type(name, (), {"number": len(cls.__members__)})
        setattr(cls, name, member)
        return member

    @property
    def __members__(cls) -> dict[str, _Type]:
        return {name: member for name, member in vars(cls).items() if isinstance(member, _Type)}

    def __int__(cls) -> int:
        return cls.number


class _Extension(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Type(name, (), {}) if name[0].isupper() else _missing(name)
        setattr(self, name, value)
        return value


def _missing(name: str) -> Callable:
    def function(*_, **__):
        raise UnsupportedError(
            "not-on-cpu",
            f"Transformer Engine called {NAME}.{name}, which has no stand-in on CPU ranks; leave out the flag that asks for it",
        )

    function.__name__ = name
    return function


def get_fused_attn_backend(*_, **__):
    """Transformer Engine asks where Megatron leaves the choice of the attention to it."""
    raise UnsupportedError(
        "not-on-cpu", "CPU ranks have no fused attention of Transformer Engine; pass --attention-backend unfused"
    )


def module() -> ModuleType:
    """Return a new module with everything in it."""
    made: Any = _Extension(NAME, "Transformer Engine's compiled extension of that name, computed by PyTorch.")
    made.DType, made.FP8FwdTensors, made.FP8BwdTensors = formats.DType, FP8FwdTensors, FP8BwdTensors
    for kernels_of in (kernels, fp8):
        for name, kernel in inspect.getmembers(kernels_of, inspect.isfunction):
            if not name.startswith("_"):
                setattr(made, name, kernel)
    for name in ("CommOverlap", "CommOverlapHelper", "CommOverlapP2P", "CommOverlapType"):
        setattr(made, name, getattr(user_buffers, name))
    made.bulk_overlap_ag_with_external_gemm = user_buffers.bulk_overlap_ag_with_external_gemm
    made.device_supports_multicast = lambda: True
    made.ubuf_built_with_mpi = lambda: False
    made.get_fused_attn_backend = get_fused_attn_backend
    made.get_cublasLt_version = lambda: 130000
    made.get_cudnn_version = lambda: 91300
    made.get_num_cublas_streams = lambda: 1
    made.get_stream_priority_range = lambda *_: (0, 0)
    return made
