"""Experiment D: what splitting the backward costs: F, I and W of a stage of two layers against its fused B.

The stage is Megatron's, with local layers and, where Transformer Engine is installed, with its own; it runs through the same
functions as in a step. Times are medians of several rounds, all of them in turn, on the device, and on the host, which
launches ahead. Under tensor parallelism (TP8), one rank's share of each layer runs, and its collectives take no time.

Claim: I and W together take at most a tenth longer than B on the device.

    python benchmarks/gpu/split_cost.py [--rehearse]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import proof

LIMIT = 1.1


def main() -> int:
    options = proof.arguments(__doc__, "split_cost")
    import torch
    import torch.distributed as dist
    from gpt_chunks import Size
    from torch.testing._internal.distributed.fake_pg import FakeStore

    report = proof.Report(options.output, options.rehearse)
    if options.rehearse:
        sizes, rounds = [Size(64, 8, 2, 16, 64)], 2
    else:
        sizes, rounds = [Size(4096, 32, 2, 4096, 32000), Size(8192, 64, 2, 4096, 32000)], 15
    for tensor in (1, 8):
        # The middle one of three stages.
        dist.init_process_group("fake", store=FakeStore(), rank=tensor, world_size=3 * tensor)
        for size, layers in product(sizes, proof.kinds_of_layers()):
            work = partial(compare, size, layers, tensor, rounds, None if options.rehearse else LIMIT)
            report.measure(f"h = {size.hidden}{', TP8' if tensor > 1 else ''}, {layers} layers", work)
            torch.cuda.empty_cache()
        dist.destroy_process_group()
    return report.finish()


def compare(size, layers: str, tensor: int, rounds: int, limit: float | None) -> tuple[dict, list[str]]:
    """The times, and whether I and W are within the limit of B."""
    times = measure(size, layers, tensor, rounds)
    device, host = ({name: times[name][at] for name in times} for at in range(2))
    ratio, host_ratio = ((of["I"] + of["W"]) / of["B"] for of in (device, host))
    missed = [f"I and W take {ratio:.2f} of B"] if limit is not None and ratio > limit else []
    values = {f"{name}_milliseconds": seconds * 1e3 for name, seconds in device.items()}
    values |= {f"{name}_host_milliseconds": seconds * 1e3 for name, seconds in host.items()}
    return values | {"split_over_fused": ratio, "split_over_fused_host": host_ratio}, missed


def measure(size, layers: str, tensor: int, rounds: int) -> dict[str, proof.Taken]:
    """Median times of F, I and W, and of F and B of the same stage, where no weight gradients are collected."""
    import torch
    from gpt_chunks import builder, make_config, open_pipelines
    from megatron.core import parallel_state

    import megatron_pipemem
    from megatron_pipemem.mcore.model.transformer_engine import defer, delayed_modules
    from megatron_pipemem.runtime.weight_gradients import WeightGradientQueue, collecting

    megatron_pipemem.enable("zb-h1")
    try:
        open_pipelines(3, 1, tensor)
        # The norm of local layers refuses sequence parallelism.
        parts = tensor if layers == "te" else 1
        config = make_config(size, 3, 1, layers, tensor_model_parallel_size=tensor, sequence_parallel=parts > 1)
        (stage,) = megatron_pipemem.build_model_chunks(builder(size, config, layers))
        delayed = delayed_modules(stage)
        shape = (size.sequence // parts, size.batch, size.hidden)
        input = torch.randn(shape, device=torch.cuda.current_device()).to(size.dtype).requires_grad_()
        gradient = torch.ones_like(input)
        seen: dict[str, list[proof.Taken]] = {name: [] for name in ("F", "I", "W", "B")}
        for _ in range(rounds + 1):
            for fused in (False, True):
                # Modules of Transformer Engine delay theirs always: of their B, the weight gradients follow at once.
                queue = WeightGradientQueue()
                outputs: list[torch.Tensor] = []
                collected = None if fused else queue

                def forward(collected=collected, outputs=outputs) -> None:
                    stage.set_input_tensor(input)
                    with collecting(collected):
                        outputs.append(stage(None, None, None))

                def backward(collected=collected, queue=queue, outputs=outputs) -> None:
                    with collecting(collected):
                        outputs.pop().backward(gradient)
                    defer(delayed, queue)

                def all_of_it(backward=backward, queue=queue) -> None:
                    backward()
                    queue.run()

                passes: dict[str, Callable[[], object]]
                passes = {"F": forward, "B": all_of_it} if fused else {"F": forward, "I": backward, "W": queue.run}
                for name, run in passes.items():
                    seen[name].append(proof.taken(run))
        # The first round warms up; F ran twice a round.
        return {
            name: proof.Taken(*map(statistics.median, zip(*times[len(times) // rounds :], strict=True)))
            for name, times in seen.items()
        }
    finally:
        megatron_pipemem.disable()
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    sys.exit(main())
