"""Import Megatron and call `cpu.activate`, in the process from which ranks are forked (see ``ranks``)."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import warnings

from megatron_pipemem.tools.cpu import activate

WHAT_RUNS_IMPORT = (
    "megatron.training.training",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",
    "torch._dynamo",  # every optimizer imports it
    "megatron_pipemem.mcore.launch",
    "megatron_pipemem.mcore.plugin",
    "megatron_pipemem.mcore.report.recording",
    "megatron_pipemem.tools.report.figure",
)


def _read_help_once() -> None:
    """Build Megatron's parser once, and keep the help that it reads from the sources of Megatron's configurations.

    Every parser of every rank would read and parse these sources again, which takes longer than a small training step.
    """
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    if not hasattr(factory, "_get_field_docstrings"):  # private, so another version may lack it
        return
    help_of = functools.cache(functools.partial(factory._get_field_docstrings, factory.__new__(factory)))
    factory._get_field_docstrings = lambda _, config: help_of(config)
    arguments.add_megatron_arguments(argparse.ArgumentParser())


activate()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns about every missing optional package
    for name in WHAT_RUNS_IMPORT:
        importlib.import_module(name)
    _read_help_once()
gc.freeze()  # these objects are never garbage, and pages that the collector does not touch stay shared
