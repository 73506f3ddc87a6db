"""Read the arguments of Megatron's own training loop (``megatron.training``).

In other training loops there are no such arguments. Functions whose result may be ``None`` then return ``None``, and
those about checkpoints to save ``False``. Others raise an error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megatron_pipemem.errors import UnsupportedError


def _arguments():
    module = sys.modules.get("megatron.training.global_vars")
    return None if module is None else module._GLOBAL_ARGS


def argument(name: str) -> Any:
    """Return the training argument with this attribute name; ``None`` if there is none or another loop runs."""
    return getattr(_arguments(), name, None)


def set_argument(name: str, value: object) -> None:
    """Set an attribute of the training arguments, which checkpoints hold; do nothing if another loop runs."""
    if (arguments := _arguments()) is not None:
        setattr(arguments, name, value)


def steps_left() -> int | None:
    """Return the number of training steps after the present one; ``None`` if it is unknown.

    Raise an UnsupportedError if the loop skips iterations, because asynchronous schedules would then have read the
    batch of a skipped iteration ahead.
    """
    arguments = _arguments()
    if arguments is None or getattr(arguments, "curr_iteration", None) is None or arguments.train_iters is None:
        return None
    if getattr(arguments, "iterations_to_skip", None):
        raise UnsupportedError(
            "unsupported-setting",
            "asynchronous schedules read the next batch ahead, so no batch can be skipped; drop --iterations-to-skip",
        )
    return arguments.train_iters - arguments.curr_iteration - 1


def iteration_and_seed() -> tuple[int, int]:
    """Return the present training step, counted from 0, and the random seed of this data-parallel rank.

    Raise an UnsupportedError if the program does not use Megatron's own training loop.
    """
    arguments = _arguments()
    if arguments is None:
        raise UnsupportedError(
            "needs-megatron-loop",
            "layerwise random numbers need the seed and the iteration of Megatron's own training loop, and this program does "
            "not use it; leave rng='layerwise' out, and begin from a checkpoint to compare schedules",
        )
    seed = arguments.seed
    if arguments.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()  # as Megatron
    return argument("curr_iteration") or 0, seed


def saves_after(iteration: int) -> bool:
    """Return whether Megatron writes a checkpoint after its loop: ``--save-interval`` does not divide ``iteration``."""
    arguments = _arguments()
    save, interval = (getattr(arguments, name, None) for name in ("save", "save_interval"))
    if not save or not interval or getattr(arguments, "skip_train", False):
        return False
    return iteration != 0 and iteration % interval != 0


def keeps_checkpoints() -> bool:
    """Return whether Megatron's training loop saves or loads checkpoints; ``False`` in other loops."""
    return any(getattr(_arguments(), name, None) for name in ("save", "load"))


def scalar_interval() -> int | None:
    """Return the iterations from one write to TensorBoard or W&B to the next; ``None`` if the loop uses neither."""
    arguments = _arguments()
    if not any(getattr(arguments, name, None) for name in ("tensorboard_dir", "wandb_project")):
        return None
    return getattr(arguments, "tensorboard_log_interval", None) or 1


def prints_log(iteration: int, is_first: bool) -> bool:
    """Return whether the loop prints its log line after this iteration."""
    return is_first or iteration % _arguments().log_interval == 0


def write_scalars(scalars: dict[str, float], step: int, wandb: bool = True) -> None:
    """Write numbers to TensorBoard at ``step``, and to W&B if ``wandb``, as far as this rank has opened them."""
    module = sys.modules["megatron.training.global_vars"]
    to_tensorboard, to_wandb = module.get_tensorboard_writer(), module.get_wandb_writer()
    if to_tensorboard is not None:
        for name, value in scalars.items():
            to_tensorboard.add_scalar(name, value, step)
        to_tensorboard.flush()
    if to_wandb is not None and wandb:
        to_wandb.log(scalars, step)


def checkpoint_folder(purpose: str, iteration: int) -> Path:
    """Return the folder of the loop's checkpoint of this iteration. ``purpose`` is ``save`` or ``load``."""
    from megatron.training.checkpointing import get_checkpoint_name

    return Path(get_checkpoint_name(getattr(_arguments(), purpose), iteration, return_base_dir=True))
