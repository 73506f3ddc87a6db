"""Keep Adam's step where Apex and Transformer Engine keep it, so that Megatron can save and resume its distributed optimizer.

PyTorch's Adam counts steps per parameter, in a tensor. Megatron's distributed optimizer cannot resume that: it expects one
number per group of parameters, as the fused optimizers have it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class FusedAdam(torch.optim.Adam):
    """Stands in for Apex's ``FusedAdam``: PyTorch's arithmetic to the bit, with ``group["step"]`` as the only step.

    Args:
        params: groups of parameters, as for PyTorch's.
        adam_w_mode: whether weight decay is decoupled from the gradient.
        options: others of PyTorch's Adam.
    """

    def __init__(self, params, adam_w_mode: bool = True, **options):
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **options)

    def step(self, closure=None):
        for group, state in self._states():
            state["step"] = torch.tensor(float(group.get("step", 0)))
        loss = super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for _, state in self._states():
            del state["step"]
        return loss

    def __setstate__(self, state) -> None:
        super(torch.optim.Adam, self).__setstate__(state)  # Adam's own looks for steps where there are none
        for group, state in self._states():
            if "step" in state:  # of a checkpoint that PyTorch's Adam has left
                group["step"] = int(state.pop("step"))

    def _states(self) -> Iterator[tuple[dict, dict]]:
        """Yield the states of parameters that have any, each behind its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    yield group, self.state[parameter]


def install() -> None:
    """Let Megatron take this optimizer where it found neither Apex's nor Transformer Engine's."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    # In fp32 the main parameters are views of the model's, which autograd does not let anybody write to.
    loading = distrib_optimizer.DistributedOptimizer
    loading.load_state_dict = torch.no_grad()(loading.load_state_dict)
