"""Watch one step on this rank, by a ledger of bytes and a clock, and tell what it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_pipemem.mcore.model.transformer_engine import uncountable
from megatron_pipemem.mcore.model.weight_memory import WeightBytes
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.host_traffic import OffloadStatistics
from megatron_pipemem.runtime.trace import Trace


@dataclass
class Observation:
    """Hold what watches one step on this rank, and what it has seen of offload and weights.

    Args:
        ledger: counts bytes; ``None`` does not.
        trace: times actions; ``None`` does not.
        offload: reads what the step's offload moved and held, if there is any.
        weights: bytes of the parameters.
        layers: of every stage of the rank.
    """

    ledger: ActivationLedger | None
    trace: Trace | None
    offload: Callable[[], OffloadStatistics | None] = lambda: None
    weights: WeightBytes | None = None
    layers: Mapping[int, int] = field(default_factory=dict)

    @property
    def clock(self) -> Trace:
        """The trace, of a step whose actions are timed."""
        assert self.trace is not None, "nobody asked for times"
        return self.trace

    @property
    def counter(self) -> ActivationLedger:
        """The ledger, of a step whose bytes are counted."""
        assert self.ledger is not None, "nobody asked for bytes"
        return self.ledger

    @property
    def on_device(self) -> Callable[[torch.Tensor], object] | None:
        """For an offload engine: how it tells the ledger what takes device memory."""
        return None if self.ledger is None else self.ledger.hold


def observe(
    chunks: list[torch.nn.Module],
    permanent: Iterable[torch.Tensor] | None = None,
    count: bool = True,
    time: bool = True,
    earlier: ActivationLedger | None = None,
    tokens: Sequence[tuple[int, int]] | None = None,
) -> Observation:
    """Begin to watch a step.

    Args:
        chunks: of this rank.
        permanent: what is no activation; by default ``permanent_tensors(chunks)``.
        count: whether bytes are to be counted. Where that would break the training, the ledger has failed from the start.
        time: whether actions are to be timed.
        earlier: the ledger of the step before, to count on from what it still holds.
        tokens: ``(b, s)`` of every microbatch, where they differ.
    """
    ledger = None
    if count:
        permanent = permanent_tensors(chunks) if permanent is None else permanent
        ledger = ActivationLedger(permanent, tokens) if earlier is None else earlier.continued(permanent)
        ledger.failure = ledger.failure or uncountable(chunks)
    trace = Trace(device_of(chunks).type == "cuda") if time else None
    return Observation(ledger, trace)


def permanent_tensors(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Return what these chunks hold that is no activation: parameters, gradient buffers, module buffers."""
    permanent: list[torch.Tensor] = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            permanent += [parameter, *(g for g in (getattr(parameter, "main_grad", None),) if g is not None)]
        # DDP shadows nn.Module.buffers() by an attribute of its own.
        permanent += torch.nn.Module.buffers(chunk)
    return permanent


def device_of(chunks: list[torch.nn.Module]) -> torch.device:
    """Return where the model is; a rank without parameters has the host alone."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
