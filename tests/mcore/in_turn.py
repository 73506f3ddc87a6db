"""Run the ranks of a program in one process, in turn."""

from __future__ import annotations

import torch

from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.schedule.action import Kind


class Mail:
    """Takes the place of ``Transport`` for all ranks: a message is there as soon as it is sent."""

    def __init__(self, placement, letters: dict):
        self.placement, self.letters = placement, letters

    def post_send(self, action, tensor: torch.Tensor) -> None:
        beside = self.placement.next_stage if action.kind is Kind.SEND_F else self.placement.previous_stage
        kind = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_I
        self.letters[kind, beside(action.stage), action.microbatch] = tensor

    def post_receive(self, action) -> None: ...

    def wait(self, action) -> torch.Tensor:
        return self.letters.pop((action.kind, action.stage, action.microbatch))

    def free_sent(self, action) -> None: ...

    def finish(self) -> None: ...

    def note_finished(self) -> None: ...


def play(executors: list[Executor], letters: dict) -> None:
    """Run the actions of all ranks, each as soon as its message is there."""
    done = [0] * len(executors)
    while any(done[rank] < len(executor.instructions) for rank, executor in enumerate(executors)):
        before = sum(done)
        for rank, executor in enumerate(executors):
            while done[rank] < len(executor.instructions):
                needed = executor.instructions[done[rank]].receive
                if needed is not None and tuple(needed) not in letters:
                    break
                done[rank] += 1
                executor.run(done[rank])
        assert sum(done) > before, "all ranks wait"
    for executor in executors:
        executor.run()
        executor.close()
