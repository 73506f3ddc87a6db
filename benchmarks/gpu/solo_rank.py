"""Experiment B: one rank's real program at real size, without its neighbours.

A rank of a pipeline runs its program through the plugin, chunks, executor, ledger and all; torch's ``fake`` backend stands in
for the other ranks, so that messages arrive at once (and hold whatever memory held).

Claims: the ledger's peak is the predicted one, to the byte, or in the predicted range where microbatches of a stage keep
different bytes; the allocator's is that and the working memory of one action.

    python benchmarks/gpu/solo_rank.py [--rehearse]
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import proof

SCHEDULES = {"1f1b": 1, "zbv": 2, "v-half": 2, "po-f": 2}
"""Names and chunks per rank."""


def main() -> int:
    options = proof.arguments(__doc__, "solo-rank")
    import torch
    import torch.distributed as dist
    from gpt_chunks import Size
    from torch.testing._internal.distributed.fake_pg import FakeStore

    report = proof.Report(options.output, options.rehearse)
    pipelines: tuple[int, ...]
    if options.rehearse:
        size, pipelines, microbatches = Size(32, 2, 2, 16, 64, dtype=torch.float32), (4,), 2
    else:
        size, pipelines, microbatches = Size(4096, 32, 4, 4096, 32000), (8, 16), 3
    for devices in pipelines:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
        for name, layers in itertools.product(SCHEDULES, proof.kinds_of_layers()):
            case = f"{name}, p = {devices}, m = {microbatches * devices}, {layers} layers"
            report.measure(case, partial(play, name, layers, size, devices, microbatches * devices))
        dist.destroy_process_group()
    return report.finish()


def play(name: str, layers: str, size, devices: int, microbatches: int) -> tuple[dict, list[str]]:
    """The first rank's steps: what was predicted, counted and allocated, and what they took, with and without counting."""
    import torch

    missed = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        try:
            counted = run_steps(name, layers, size, devices, microbatches, path)
            plain = run_steps(name, layers, size, devices, microbatches, None)
        except torch.OutOfMemoryError as error:
            return {"error": str(error).splitlines()[0]}, ["it does not fit into this GPU"]
        seen = json.loads(path.read_text())["ranks"][0]
    predicted, allocated = seen["predicted_peak_bytes"], counted["allocated_bytes"]
    if not seen["predicted_least_peak_bytes"] <= seen["counted_peak_bytes"] <= predicted:
        missed.append(f"the ledger counted {seen['counted_peak_bytes']} bytes, not {predicted}")
    if torch.cuda.is_available() and 0 < allocated < predicted:
        missed.append(f"the allocator never held the predicted {predicted} bytes, {allocated} at most")
    values = {
        "predicted_bytes": predicted,
        "counted_bytes": seen["counted_peak_bytes"],
        "allocated_bytes": allocated,
        "reserved_bytes": counted["reserved_bytes"],
        "host_stall_seconds": seen["stall_seconds"],
        "step_seconds": plain["step_seconds"],
        "step_seconds_counting": counted["step_seconds"],
    }
    return values, missed


def run_steps(name: str, layers: str, size, devices: int, microbatches: int, path: Path | None, steps: int = 3) -> dict:
    """Bytes and seconds of steps, after the first two.

    Args:
        path: of the run's report. Without it, nothing is counted or timed within the steps.
    """
    import torch
    from gpt_chunks import training
    from megatron.core import parallel_state

    import megatron_pipemem
    from megatron_pipemem.features.offload.megatron import _rank_budget as rank_budget

    gc.collect()
    torch.cuda.empty_cache()  # of earlier runs

    def budget_alone(nodes, per_node: float | None) -> int:
        return rank_budget(nodes[:1], per_node)

    chunks = SCHEDULES[name]
    megatron_pipemem.enable(name, report=None if path is None else str(path))
    # The backend answers for the other ranks with what this one says, so the model cannot look whole, and the host would
    # be shared by all ranks.
    with (
        mock.patch("megatron_pipemem.mcore.step.forward_backward.check_whole_model"),
        mock.patch("megatron_pipemem.features.offload.megatron._rank_budget", budget_alone),
    ):
        try:
            step = training(size, layers, devices, chunks, microbatches)
            for _ in range(2):  # by the order for one hardware queue; gradients are allocated
                step()
            torch.cuda.synchronize()
            permanent = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - begin) / steps
            if path is not None:
                megatron_pipemem.write_report()
        finally:
            megatron_pipemem.disable()
            parallel_state.destroy_model_parallel()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated() - permanent,
        "reserved_bytes": torch.cuda.max_memory_reserved() - permanent,
        "step_seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
