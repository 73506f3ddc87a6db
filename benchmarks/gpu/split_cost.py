"""Experiment D: what splitting the backward costs: F, I and W of a stage of two layers against its fused B.

The stage is Megatron's, with local layers and, where Transformer Engine is installed, with its own; it runs through the same
functions as in a step. Times are those of the device, medians of several rounds, all of them in turn.

Claim: I and W together take at most a tenth longer than B.

    python benchmarks/gpu/split_cost.py [--rehearse]
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

import proof

LIMIT = 1.1


def main() -> int:
    options = proof.arguments(__doc__, "split-cost")
    import torch
    import torch.distributed as dist
    from gpt_chunks import Size
    from torch.testing._internal.distributed.fake_pg import FakeStore

    report = proof.Report(options.output, options.rehearse)
    if options.rehearse:
        sizes, rounds = [Size(32, 2, 2, 16, 64)], 2
    else:
        sizes, rounds = [Size(4096, 32, 2, 4096, 32000), Size(8192, 64, 2, 4096, 32000)], 15
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    for size in sizes:
        for layers in proof.kinds_of_layers():
            work = partial(compare, size, layers, rounds, None if options.rehearse else LIMIT)
            report.measure(f"h = {size.hidden}, {layers} layers", work)
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return report.finish()


def compare(size, layers: str, rounds: int, limit: float | None) -> tuple[dict, list[str]]:
    """The times, and whether I and W are within the limit of B."""
    times = measure(size, layers, rounds)
    ratio = (times["I"] + times["W"]) / times["B"]
    missed = [f"I and W take {ratio:.2f} of B"] if limit is not None and ratio > limit else []
    values = {f"{name}_milliseconds": seconds * 1e3 for name, seconds in times.items()}
    return values | {"split_over_fused": ratio}, missed


def measure(size, layers: str, rounds: int) -> dict[str, float]:
    """Median seconds of F, I and W, and of F and B of the same stage when nobody collects weight gradients."""
    import torch
    from gpt_chunks import builder, make_config
    from megatron.core import parallel_state, tensor_parallel

    import megatron_pipemem
    from megatron_pipemem.mcore.model.transformer_engine import defer, delayed_modules
    from megatron_pipemem.runtime.weight_gradients import WeightGradientQueue, collecting

    megatron_pipemem.enable("zb-h1")
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = make_config(size, 3, 1, layers)
        (stage,) = megatron_pipemem.build_model_chunks(builder(size, config, layers))
        delayed = delayed_modules(stage)
        shape = (size.sequence, size.batch, size.hidden)
        input = torch.randn(shape, device=torch.cuda.current_device()).to(size.dtype).requires_grad_()
        gradient = torch.ones_like(input)
        seen: dict[str, list[float]] = {name: [] for name in ("F", "I", "W", "B")}
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

                if fused:
                    seconds = [proof.seconds(forward), proof.seconds(all_of_it)]
                else:
                    seconds = [proof.seconds(forward), proof.seconds(backward), proof.seconds(queue.run)]
                for name, taken in zip("FB" if fused else "FIW", seconds, strict=True):
                    seen[name].append(taken)
        # The first round warms up; F ran twice a round.
        return {name: statistics.median(times[len(times) // rounds :]) for name, times in seen.items()}
    finally:
        megatron_pipemem.disable()
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    sys.exit(main())
