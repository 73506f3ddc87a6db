"""A tensor class by the rules of Transformer Engine's ``QuantizedTensor``."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map


class Quantised(torch.Tensor):
    """Values in 8 bits. An operator that the class does not know gets a copy in high precision, and what it writes is lost.

    As in Transformer Engine 2.8, the tensor's own storage is of the size of the values in high precision.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor):
        self.eight_bits = data

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.eight_bits, None

    def value(self) -> torch.Tensor:
        return self.eight_bits.float()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].eight_bits)
        plain = tree_map(lambda value: value.value() if isinstance(value, Quantised) else value, args)
        return function(*plain, **(kwargs or {}))


class WithEmptyStorage(Quantised):
    """As in Transformer Engine 2.20, where every call returns a new empty storage."""

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)


def eight_bits(size: int) -> torch.Tensor:
    return torch.full((size,), 2, dtype=torch.int8)
