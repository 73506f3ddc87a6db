"""Program of a rank: training without a barrier between steps while something goes wrong."""

from __future__ import annotations

import os
import signal
from unittest import mock

import overlapping
import torch.distributed as dist
from overlapping import Training

import megatron_pipemem
from megatron_pipemem.features.overlap_steps.megatron.optimizer import OverlappedOptimizer


def run(case: dict) -> dict:
    """Train as ``overlapping.run`` does, with the case's ``fault``."""
    return _FAULTS[case["fault"]](case)


def _poisoned(case: dict) -> dict:
    """On one rank, gradients of some steps are no numbers: the case's ``poison``, by step."""

    class Poisoned(Training):
        def _forward_backward(self, step: int, *args, **kwargs) -> list[str]:
            losses = super()._forward_backward(step, *args, **kwargs)
            if step in case["poison"] and dist.get_rank() == 2:
                next(self.chunks[0].parameters()).main_grad.view(-1)[3] = case["poison"][step]
            return losses

    return overlapping.run(case, Poisoned)


def _at_the_margin(case: dict) -> dict:
    """The norm of the first step is the limit, which may be larger by the case's ``over``, as sums of two programs differ."""
    (norm,) = overlapping.run(case | {"steps": 1}, kinds=("synchronous",))["synchronous"]["norms"]
    limit = float.fromhex(norm) * (1 + case["over"])

    class Limited(Training):
        def __init__(self, *args):
            super().__init__(*args)
            self.optimizer.config.clip_grad = limit
            assert all(part.config is self.optimizer.config for part in self.optimizer.chained_optimizers)

    return overlapping.run(case, Limited)


def _disabled(case: dict) -> dict:
    """The plugin is disabled behind the last step, which is pending and must be taken back."""

    class Disabled(Training):
        def run(self) -> dict:
            stock = type(self.optimizer).step
            with mock.patch.object(megatron_pipemem, "settle", megatron_pipemem.disable):
                shown = super().run()
            assert self.optimizer.step.__func__ is stock
            return shown

    return overlapping.run(case, Disabled)


def _raises(case: dict) -> dict:
    """The first forward of a step fails on one rank, while the step before is pending."""
    seen = {}

    class Raising(Training):
        def _forward_backward(self, step: int, *args, **kwargs) -> list[str]:
            if step == 3 and dist.get_rank() == 0:
                seen["pending"] = _pending()
                with mock.patch.object(overlapping, "_forward_step", _fail):
                    return super()._forward_backward(step, *args, **kwargs)
            return super()._forward_backward(step, *args, **kwargs)

    text = "nothing"
    try:
        overlapping.run(case, Raising, kinds=("overlapped",))
    except Exception as error:
        text = " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
    return {"failure": text, **seen}


def _pending() -> bool:
    from megatron_pipemem.mcore import plugin

    features = plugin._enabled.features
    (steps,) = (feature for feature in features if type(feature).__name__ == "OverlappedSteps")
    return steps._optimizer.is_pending


def _fail(*_) -> None:
    raise ArithmeticError("this rank cannot go on")


def _killed(case: dict) -> dict:
    """A rank is killed between an optimizer's step and its validation."""

    def kill(optimizer: OverlappedOptimizer) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        with mock.patch.object(OverlappedOptimizer, "validate", kill):
            return overlapping.run(case, kinds=("overlapped",))
    return overlapping.run(case, kinds=("overlapped",))


_FAULTS = {
    "poisoned": _poisoned,
    "at the margin": _at_the_margin,
    "disabled": _disabled,
    "raises": _raises,
    "killed": _killed,
}
