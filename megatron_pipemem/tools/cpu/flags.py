"""The flags of Megatron that a run on CPU ranks needs."""

from __future__ import annotations

import math
import os

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.flags import Flags, values_by_flag, words
from megatron_pipemem.logs import logger, tell
from megatron_pipemem.refusals import CPU, flag_values

_LAYERS = "transformer-impl"
CPU_FLAGS: Flags = {
    "distributed-backend": "gloo",
    "transformer-impl": "local",
    "num-workers": 0,
    "no-persist-layer-norm": True,
    "no-gradient-accumulation-fusion": True,
    "no-masked-softmax-fusion": True,
    "no-bias-dropout-fusion": True,
    "no-bias-gelu-fusion": True,
    "no-bias-swiglu-fusion": True,
    "no-rope-fusion": True,
}
"""The flags with which the training script runs without CUDA, Transformer Engine and Apex."""


def cpu_flags(arguments: list[str]) -> list[str]:
    """Return the flags that a Megatron command line lacks for a run on CPU ranks, and log them.

    The caller appends them. The last occurrence of a flag counts, so they override any ``--transformer-impl`` but
    ``local``. Without ``--micro-batch-size``, which Megatron's training requires, the command line is another program's
    and gets no flags.

    Raises:
        UnsupportedError: a flag asks for a kernel that only a GPU has, or no launcher has started the ranks.
    """
    flags = values_by_flag(arguments)
    if "micro-batch-size" not in flags:
        return []
    _check_launched(flags)
    # The table of ``gates`` for CPU ranks, alone: there is no request yet, and programs without our flags run here too.
    for error in CPU.errors(flag_values(flags)):
        raise error
    lacking = {name: value for name, value in CPU_FLAGS.items() if name not in flags}
    if flags.get(_LAYERS) != CPU_FLAGS[_LAYERS]:
        lacking[_LAYERS] = CPU_FLAGS[_LAYERS]  # the last one counts
    added = words(lacking)
    if added:
        tell(logger, "CPU ranks: added %s", " ".join(added))
    return added


_CUTS = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")


def _check_launched(flags: Flags) -> None:
    """Raise an UnsupportedError if the model is cut over several ranks, and this process is alone."""
    sizes = [str(flags.get(name, 1)) for name in _CUTS]
    ranks = math.prod(int(size) for size in sizes if size.isdecimal())
    if ranks > 1 and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        raise UnsupportedError(
            "no-launcher",
            f"the flags cut the model over {ranks} ranks, and this process is alone; start it by "
            f"torchrun --nproc-per-node {ranks} -m megatron_pipemem run --cpu ...",
        )
