"""Read the arguments of Megatron's own training loop.

Other loops have no such arguments, and the functions then return ``None`` or raise.
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


def argument(name: str) -> object:
    """Return an argument of the loop by its attribute; ``None`` where there is none, or no such loop."""
    return getattr(_arguments(), name, None)


def steps_left() -> int | None:
    """Return the training steps after the present one; ``None`` if not known.

    Raise an UnsupportedError if the loop skips batches, because data that are read ahead would be of the wrong ones.
    """
    arguments = _arguments()
    if arguments is None or getattr(arguments, "curr_iteration", None) is None or arguments.train_iters is None:
        return None
    if getattr(arguments, "iterations_to_skip", None):
        raise UnsupportedError(
            "unsupported-setting",
            "asynchronous schedules read data of the next batch, so none can be skipped; drop --iterations-to-skip",
        )
    return arguments.train_iters - arguments.curr_iteration - 1


def running_iteration() -> int | None:
    """Return the present training step, 0 for the first; ``None`` if not known."""
    return getattr(_arguments(), "curr_iteration", None)


def iteration_and_seed() -> tuple[int, int]:
    """Return the present training step, 0 before the first, and the seed of this rank's share of the data.

    Raise an UnsupportedError if the loop is not Megatron's.
    """
    arguments = _arguments()
    if arguments is None:
        raise UnsupportedError(
            "needs-megatron-loop",
            "layerwise random numbers need the seed and the iteration of Megatron's own training loop, and this program does "
            "not use it; leave random='layerwise' out, and begin from a checkpoint to compare schedules",
        )
    seed = arguments.seed
    if arguments.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()  # as Megatron
    return running_iteration() or 0, seed


def saves_after(iteration: int) -> bool:
    """Return whether the loop, which ends after that iteration, saves a last checkpoint when it has returned."""
    arguments = _arguments()
    save, interval = (getattr(arguments, name, None) for name in ("save", "save_interval"))
    if not save or not interval or getattr(arguments, "skip_train", False):
        return False
    return iteration != 0 and iteration % interval != 0


def keeps_checkpoints() -> bool:
    """Return whether the training loop saves or loads checkpoints."""
    return any(getattr(_arguments(), name, None) for name in ("save", "load"))


def scalar_interval() -> int | None:
    """Return the iterations from one of the loop's scalars to the next; ``None`` where it writes none."""
    arguments = _arguments()
    if not any(getattr(arguments, name, None) for name in ("tensorboard_dir", "wandb_project")):
        return None
    return getattr(arguments, "tensorboard_log_interval", None) or 1


def prints_log(iteration: int, is_first: bool) -> bool:
    """Return whether the loop prints a line of its log for an iteration that has ended."""
    return is_first or iteration % _arguments().log_interval == 0


def is_last(iteration: int) -> bool:
    """Return whether the loop ends after that iteration, however early it may end otherwise."""
    return iteration == _arguments().train_iters


def consumed_samples() -> int:
    """Return the training samples of all iterations so far."""
    return _arguments().consumed_train_samples


def write_scalars(scalars: dict[str, float], step: int, wandb: bool = True) -> None:
    """Write numbers to TensorBoard and W&B, each if it is open on this rank. The steps of W&B are iterations."""
    to_tensorboard, to_wandb = open_writers()
    if to_tensorboard is not None:
        for name, value in scalars.items():
            to_tensorboard.add_scalar(name, value, step)
        to_tensorboard.flush()
    if to_wandb is not None and wandb:
        to_wandb.log(scalars, step)


def open_writers() -> tuple[Any, Any]:
    """Return TensorBoard's writer and W&B, each if the loop has opened it on this rank."""
    module = sys.modules["megatron.training.global_vars"]
    return module.get_tensorboard_writer(), module.get_wandb_writer()


def checkpoint_folder(purpose: str, iteration: int) -> Path:
    """Return where the loop keeps a checkpoint of that iteration; ``purpose`` is ``save`` or ``load``."""
    from megatron.training.checkpointing import get_checkpoint_name

    return Path(get_checkpoint_name(getattr(_arguments(), purpose), iteration, return_base_dir=True))
