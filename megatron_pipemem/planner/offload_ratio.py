"""Compute k: the time a layer's activations take to the host and back, over the time of the layer's F, I and W.

The paper (arXiv 2503.01328) has ``k = 10 / (3 (6h + s)) * C / B`` for GPT-3's layer in 16 bits with norms, activation and
dropout recomputed (``20bsh`` bytes, ``12bsh(6h + s)`` FLOPs), ``C`` the achieved FLOP/s and ``B`` the bytes per second of
one direction. Here bytes and FLOPs are those of any model, cut up and recomputed in any way. Where
``k <= 1`` computing hides all transfers of a channel that carries one direction at a time; otherwise a part ``1/k``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.config.cluster import Cluster, HostChannel
from megatron_pipemem.config.model import Execution, Model, Recomputable
from megatron_pipemem.planner.activations import moved_bytes
from megatron_pipemem.planner.counts import layer_flops

CHEAP: tuple[Recomputable, ...] = ("layernorm", "activation")
"""What is cheaper to compute again than to move."""


def offload_ratio(
    model: Model,
    execution: Execution,
    flops: float,
    channel: HostChannel,
    sharing: int = 1,
    seconds: float | None = None,
) -> float:
    """Return k of one layer, of those that the model has most of. ``flops``: per second that the device achieves.
    ``sharing``: devices that use the channel at the same time. ``seconds``: of the layer's F, I and W where they were
    measured.
    """
    if seconds is None:
        seconds = layer_flops(model, execution, model.main_kind).total / flops
    return channel.round_trip_seconds(moved_bytes(model, execution, model.main_kind), sharing) / seconds


def cluster_offload_ratio(model: Model, execution: Execution, cluster: Cluster) -> float:
    """Return k of one layer on the first device of a node, with the devices that share its switch moving as much."""
    return offload_ratio(model, execution, cluster.flops, cluster.host, cluster.sharing(0))


def cheap_recompute(execution: Execution) -> Execution:
    """Return k with norms, activation and dropout masks recomputed, as offload assumes."""
    if execution.recompute == "full":
        return execution
    modules = execution.recompute_modules if execution.recompute == "selective" else ()
    return replace(execution, recompute="selective", recompute_modules=tuple(dict.fromkeys((*modules, *CHEAP))))
