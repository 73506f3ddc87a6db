"""Build the module ``transformer_engine_torch`` as Transformer Engine's Python sees it.

What training in fp32, bf16 and fp16 calls is in ``kernels``. Every other name is there as well, because Transformer Engine
takes hundreds of them when it is imported: types answer with members on demand, functions raise when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import ModuleType

from megatron_pipemem.cpu.transformer_engine import kernels
from megatron_pipemem.errors import UnsupportedError

NAME = "transformer_engine_torch"


class FP8FwdTensors(IntEnum):
    """Positions in lists of quantizers."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(IntEnum):
    """Positions in lists of quantizers."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class _Type(type):
    """A class whose members are made when they are first asked for; good as keys, to compare, and to inherit from."""

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
            f"Transformer Engine called {NAME}.{name}, which has no stand-in on CPU ranks; leave out the flag that asks for it"
        )

    function.__name__ = name
    return function


def get_fused_attn_backend(*_, **__):
    """Transformer Engine asks where Megatron leaves the choice of the attention to it."""
    raise UnsupportedError("CPU ranks have no fused attention of Transformer Engine; pass --attention-backend unfused")


def module() -> ModuleType:
    """Return a new module with everything in it."""
    made = _Extension(NAME, "Transformer Engine's compiled extension of that name, computed by PyTorch.")
    made.DType, made.FP8FwdTensors, made.FP8BwdTensors = kernels.DType, FP8FwdTensors, FP8BwdTensors
    for kernel in (*kernels.KERNELS, get_fused_attn_backend):
        setattr(made, kernel.__name__, kernel)
    made.get_cublasLt_version = lambda: 130000
    made.get_cudnn_version = lambda: 91300
    made.get_num_cublas_streams = lambda: 1
    made.get_stream_priority_range = lambda *_: (0, 0)
    return made
