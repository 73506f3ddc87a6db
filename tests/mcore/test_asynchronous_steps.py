"""The training steps of an asynchronous schedule as its stream counts them. No process group, nothing is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from refusals import refused

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.asynchronous.megatron import training
from megatron_pipemem.features.asynchronous.megatron.training import AsynchronousTraining, StageOptimizer
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.executor import InFlight


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(training, "agree", lambda digest, group: None)


class Steps:
    """Runs steps that do nothing on one of two ranks."""

    def __init__(self, train_steps: int):
        self.training = AsynchronousTraining(ProgramStore(Request("pipedream-2bw")), train_steps)
        self.chunks = [torch.nn.Linear(2, 2)]

    def begin(self):
        step = SimpleNamespace(
            context=SimpleNamespace(config=SimpleNamespace()),
            chunks=self.chunks,
            shape=Shape(2, 1, 4),
            pipeline=SimpleNamespace(device=0, group=None),
            single_queue=False,
        )
        self.training.choose(step)
        return self.training._call

    def updated(self) -> None:
        """Run where a program would."""

    def run(self, fails: bool = False) -> int:
        call = self.begin()
        executor = SimpleNamespace(in_flight=InFlight, take_in=lambda left: None)
        with self.training.around(SimpleNamespace(executor=executor)):
            # As a program does that updates the weights once.
            self.updated()
            weights = self.training._stream.weights
            weights.advance([weights.newest])
            if fails:
                raise ArithmeticError
        return call.left


def test_more_steps_than_were_told_are_refused_as_that():
    steps = Steps(2)
    assert [steps.run(), steps.run()] == [1, 0]
    with refused("steps-exhausted", "train_steps", 2, kind=UnsupportedError):
        steps.begin()


def test_an_optimizer_step_between_passes_runs_without_timers():
    """They would wait for the device, and by default for all ranks, which are at other passes."""
    chunk, own = torch.nn.Linear(2, 2), SimpleNamespace(timers="the optimizer's")
    chunk.config, seen = SimpleNamespace(timers="the model's"), []

    def note() -> None:
        seen.append((chunk.config.timers, own.timers))

    part = SimpleNamespace(config=own, prepare_grads=note, step_with_ready_grads=note, zero_grad=lambda: None)
    chained = SimpleNamespace(chained_optimizers=[part, part], step=None, **vars(part))
    for optimizer in (part, chained):
        stage = StageOptimizer(Request("pipedream"))
        stage.catch(lambda config, chunks, built=optimizer: built, SimpleNamespace(clip_grad=0.0), [chunk])
        stage.step([chunk], note)
    assert seen == [(None, None)] * 6 and (chunk.config.timers, own.timers) == ("the model's", "the optimizer's")


def test_the_scale_of_router_losses_is_training_s_after_an_evaluation(monkeypatch):
    """Evaluation divides by its own number of microbatches, and backwards of earlier forwards come behind it."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(0.25))
    steps, seen = Steps(3), []
    monkeypatch.setattr(steps, "updated", lambda: seen.append(float(MoEAuxLossAutoScaler.main_loss_backward_scale)))
    for _ in range(2):
        steps.run()
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    steps.run()
    assert seen == [0.25, 0.25, 0.25]


def test_a_step_that_failed_is_still_to_come():
    steps = Steps(3)
    assert steps.run() == 2
    with pytest.raises(ArithmeticError):
        steps.run(fails=True)
    assert [steps.run(), steps.run()] == [1, 0]


def test_ranks_that_need_other_orders_do_not_agree(monkeypatch):
    """The first steps have one order everywhere. Ranks with another environment are refused then, and not at the third."""
    told = []
    monkeypatch.setattr(training, "agree", lambda digest, group: told.append(digest))
    for queues in ((False, True), (True,)):
        steps = Steps(2)
        steps.training._programs.queues = queues
        steps.run()
    assert told[0] != told[1]
