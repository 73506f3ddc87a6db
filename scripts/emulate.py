"""Train in one process on the CPU, without a pipeline, by the update rule of an asynchronous schedule.

pipemem run --cpu scripts/emulate.py RULE STAGES SCRIPT [flags of the script and --pipemem-* flags]

The losses are the reference for asynchronous training, because they follow from the papers' update rules only.

One process holds the whole model and runs Megatron's own schedule without a pipeline. Before it computes a gradient, it
overwrites the weights by the version that the rule wants. Afterwards it restores the newest weights and steps the
optimizer. The code shares nothing with the pipeline that it checks: it has no schedule and no executor, and copies
weights.

* ``pipedream-2bw`` (arXiv 2006.09503): ``W(t+1) = W(t) - lr * gradient(W(t-1))`` with ``W(-1) = W(0)``, per batch;
* ``pipedream`` (arXiv 1806.03377): for the gradient of microbatch ``k``, stage ``s`` of ``n`` has the weights after
  ``max(0, k - (n-1-s))`` updates, and each stage is updated after every microbatch;
* ``pipedream-vertical-sync``: the same, but all stages have the weights after ``max(0, k - (n-1))`` updates.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_pipemem.errors import UnsupportedError

RULES = ("pipedream", "pipedream-2bw", "pipedream-vertical-sync")

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@contextmanager
def emulated(rule: str, num_stages: int, replicas: int = 1) -> Iterator[None]:
    """Make Megatron's training steps without a pipeline follow ``rule`` while the block runs.

    Layers are cut evenly into ``num_stages`` emulated stages. Embedding and head are on the first and last stage. An
    update uses one microbatch of each of the ``replicas`` emulated data-parallel replicas. Raise an UnsupportedError
    for an unknown rule.
    """
    from unittest import mock

    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    if rule not in RULES:
        raise UnsupportedError("bad-choice", f"there is no rule {rule!r}; give one of {', '.join(RULES)}")
    emulator = _Emulator(rule, num_stages, replicas, schedules.forward_backward_no_pipelining, schedules.forward_step)
    get_optimizer = training.get_megatron_optimizer

    def get_megatron_optimizer(*args, **kwargs):
        emulator.optimizer = get_optimizer(*args, **kwargs)
        if emulator.per_microbatch:
            emulator.optimizer.step = lambda: (True, None, None)
        return emulator.optimizer

    with (
        mock.patch.object(schedules, "forward_backward_no_pipelining", emulator.step),
        mock.patch.object(schedules, "forward_step", emulator.forward_step),
        mock.patch.object(training, "get_megatron_optimizer", get_megatron_optimizer),
    ):
        yield


class _Emulator:
    def __init__(self, rule: str, num_stages: int, replicas: int, original, forward_step):
        self.per_microbatch = rule != "pipedream-2bw"
        self.optimizer: Any = None
        self._vertical = rule == "pipedream-vertical-sync"
        self._stages = num_stages
        self._replicas = replicas
        self._original = original
        self._forward_step = forward_step
        self._microbatch: int | None = None
        """The number of the running microbatch within its batch, if weights are updated after every microbatch."""
        self._updates = 0
        self._history: dict[int, list] = {}
        """Copies of all weights, by the number of updates that they have had."""

    def step(self, *, model, num_microbatches: int, forward_only: bool = False, **call) -> list:
        """Run a training step by the rule. It replaces Megatron's forward-backward function.

        Evaluation runs unchanged.
        """
        chunk = model[0] if isinstance(model, list) else model
        if forward_only:
            return self._original(model=model, num_microbatches=num_microbatches, forward_only=True, **call)
        if not self.per_microbatch:
            self._remember(chunk, 2)
            self._show(chunk, lambda stage: max(0, self._updates - 1))
            data = self._original(model=model, num_microbatches=num_microbatches, **call)
            self._show(chunk, lambda stage: self._updates)
            self._updates += 1
            return data
        data, last = [], self._stages - 1
        for number in range(num_microbatches // self._replicas):
            self._microbatch = number
            self._remember(chunk, self._stages)
            k = self._updates
            self._show(chunk, lambda stage, k=k: max(0, k - (last if self._vertical else last - stage)))
            data += self._original(model=model, num_microbatches=self._replicas, **call)
            self._show(chunk, lambda stage, k=k: k)
            self.optimizer.prepare_grads()
            self.optimizer.step_with_ready_grads()
            chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._updates += 1
        self._microbatch = None
        return data

    def forward_step(self, *args, current_microbatch=None, **kwargs):
        """Run the forward of a microbatch with its number in the batch, on which random numbers may depend."""
        number = current_microbatch if self._microbatch is None else self._microbatch
        return self._forward_step(*args, current_microbatch=number, **kwargs)

    def _remember(self, chunk, most: int) -> None:
        self._history[self._updates] = [parameter.detach().clone() for parameter in chunk.parameters()]
        self._history.pop(self._updates - most, None)

    def _show(self, chunk, updates_of) -> None:
        """Set the weights of each stage to those after ``updates_of(stage)`` updates."""
        for number, (parameter, stage) in enumerate(
            zip(chunk.parameters(), self._stages_of_parameters(chunk), strict=True)
        ):
            parameter.data.copy_(self._history[updates_of(stage)][number])

    def _stages_of_parameters(self, chunk) -> list[int]:
        names = [name for name, _ in chunk.named_parameters()]
        layers = [int(match[1]) for name in names if (match := _LAYER.search(name))]
        per_stage, rest = divmod(max(layers) + 1, self._stages)
        if rest:
            raise UnsupportedError(
                "does-not-divide", f"{max(layers) + 1} layers cannot be cut evenly into {self._stages} stages"
            )
        stages = []
        for name in names:
            match = _LAYER.search(name)
            stages.append(int(match[1]) // per_stage if match else 0 if "embedding" in name else self._stages - 1)
        return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("stages", type=int, help="number of stages of the emulated pipeline")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    sys.argv = [str(asked.script), *asked.arguments]
    sys.path[0] = str(asked.script.resolve().parent)
    with emulated(asked.rule, asked.stages):
        runpy.run_path(str(asked.script), run_name="__main__")


if __name__ == "__main__":
    main()
