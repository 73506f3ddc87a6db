"""Leave out of the log of CPU ranks what Megatron says only because there is no GPU, and what it says on every rank."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from typing import Any

logger = logging.getLogger(__name__)

_MISSING = ".*(Apex|Transformer Engine|transformer-engine|absl.logging|no accelerator is found)"
_RANDOM = "megatron.core.tensor_parallel.random"
_ABOUT_EVERY_RANK = ("megatron.core.distributed", "megatron.core.datasets")


def ignore_missing_packages() -> None:
    """Ignore the warnings of Megatron and PyTorch about packages and devices that CPU ranks do not use."""
    warnings.filterwarnings("ignore", _MISSING, UserWarning, r"megatron\.|torch\.utils\.data\.")
    logging.getLogger(_RANDOM).addFilter(_is_about_a_gpu)


def missing_packages() -> str | None:
    """Return one line in the place of the warnings that are ignored, ``None`` if Megatron has no cause for them."""
    missing = [name for name in ("apex", "transformer_engine") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed, nor needed here; --verbose shows Megatron's warnings about it"


def _is_about_a_gpu(record: logging.LogRecord) -> bool:
    """Return False for the warning that CUDA's random numbers are the CPU's, which they are here."""
    return not record.getMessage().startswith("CPU RNG state changed")


def shorten_log() -> None:
    """Shorten the log of this rank: Megatron's INFO lines come from rank 0, and its list of arguments is one line."""
    if (said := missing_packages()) is not None:
        logger.info("CPU ranks: %s", said)
    if os.environ.get("RANK", "0") != "0":
        for name in _ABOUT_EVERY_RANK:
            logging.getLogger(name).setLevel(logging.WARNING)
    if (arguments := sys.modules.get("megatron.training.arguments")) is not None:
        arguments.__dict__["_print_args"] = _count_arguments


def _count_arguments(title: str, arguments: Any) -> None:
    logger.info("Megatron has %d %s; --verbose lists them", len(vars(arguments)), title)
