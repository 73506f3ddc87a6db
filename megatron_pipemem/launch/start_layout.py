"""The layers per stage that a run has when it starts: by its flags, or computed with ``--pipemem-layout auto``."""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.config import layout
from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.launch.cut_flags import REPLACED_BY_LAYOUT, needed_layout
from megatron_pipemem.planner.balance import Balance, balance
from megatron_pipemem.schedule.options import AUTO, STOCK
from megatron_pipemem.schedule.placement import Placement

PRICED_FOR = "h100-80g"
"""The cluster by whose prices a run computes its layout. Only their ratios matter, and the memory of a device."""
_FLAG = "pipemem-layout"


def at_start(run: Run) -> Balance:
    """Return the layouts that a run with ``--pipemem-layout auto`` compares when it starts.

    A run does not know its cluster, so the prices are those of ``PRICED_FOR``, for as many nodes and devices.
    """
    nodes, devices = run.cluster.nodes, run.cluster.devices_per_node
    cluster = replace(load(PRICED_FOR, Cluster), nodes=nodes, devices_per_node=devices)
    return balance(replace(_uncut(run), cluster=cluster))


def laid_out(run: Run) -> Run:
    """Return the run with the layout that it gets by ``--pipemem-layout auto``; the run unchanged without that flag.

    With one pipeline rank, only the flags that cut the model are dropped.
    """
    if run.flags.get(_FLAG) != AUTO:
        return run
    uncut = _uncut(run)
    return uncut if run.parallelism.pp == 1 else layout.with_cut(uncut, at_start(run).best.layers)


def _uncut(run: Run) -> Run:
    replaced = (*REPLACED_BY_LAYOUT, _FLAG)
    return replace(run, megatron={k: v for k, v in run.megatron.items() if k.replace("_", "-") not in replaced})


def layers_of(run: Run, placement: Placement) -> tuple[int, ...] | None:
    """Return the number of layers of every stage, by a run's flags or by the layout that this package adds to them.

    Multi-token prediction counts as one more layer. The result is ``None`` if the layers are unknown.
    """
    counts = layout.pieces_of(run, placement.model_stages)
    if counts is not None or run.schedule.name == STOCK or run.model.pattern is not None:
        return counts
    needed = needed_layout(run.flags, run.model.layers, placement.num_devices, placement)
    return None if needed is None else layout.read(needed.text)
