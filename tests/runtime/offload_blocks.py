"""A small transformer stack, loops that offload it, and an independent count of what autograd saves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional as F

MIN_BYTES = 64


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, width = x.shape
        q, k, v = (
            t.view(length, self.heads, width // self.heads).transpose(0, 1)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = torch.softmax(q @ k.transpose(1, 2) / 3, dim=-1) @ v
        x = x + self.proj(mixed.transpose(0, 1).reshape(length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def stack(dtype: torch.dtype = torch.float32, device: str = "cpu", blocks: int = 2) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(*(Block(16, 2) for _ in range(blocks))).to(device, dtype)


def batch(microbatch: int, length: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(length, 16, generator=generator).to(device, dtype)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def plain_gradients(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    for x in batches:
        model(x).float().square().sum().backward()
    return gradients(model)


def offloaded_gradients(model, engine, batches: list[torch.Tensor], look: Callable[[], None] = lambda: None):
    """All forwards, everything away, then all backwards, each reloaded one ahead. ``look`` runs after every action."""
    model.zero_grad()
    losses = {}
    for key, x in enumerate(batches):
        with engine.capture(key):
            losses[key] = model(x).float().square().sum()
        look()
        engine.stay(key, [x])
        engine.offload(key)
        if key:
            engine.wait(key - 1)
            look()
    engine.wait(len(batches) - 1)
    look()
    engine.reload(0)
    for key in range(len(batches)):
        engine.wait(key)
        if key + 1 < len(batches):
            engine.reload(key + 1)
        look()
        losses.pop(key).backward()
        look()
    return gradients(model)


def saved_bytes(model: torch.nn.Module, x: torch.Tensor, min_bytes: int = MIN_BYTES) -> int:
    """What one forward keeps besides parameters and ``x``, in storages of at least ``min_bytes``: by bare autograd hooks."""
    permanent = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in permanent and storage.nbytes() >= min_bytes:
            storages[storage.data_ptr()] = storage  # kept, so that no address comes twice
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(x).float().square().sum()
    assert kept.grad_fn is not None
    return sum(storage.nbytes() for storage in storages.values())


@contextlib.contextmanager
def closing(engine):
    try:
        yield engine
    finally:
        engine.close()
