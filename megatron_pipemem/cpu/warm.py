"""Importing this imports Megatron on the CPU lane, for processes that others are forked from (see ``ranks``)."""

from __future__ import annotations

import gc
import importlib
import warnings

from megatron_pipemem.cpu import activate

WHAT_RUNS_IMPORT = (
    "megatron.training.training",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.tokenizers.text",
    "torch._dynamo",  # every optimizer does
    "megatron_pipemem.mcore.launch",
    "megatron_pipemem.report.figure",
)

activate()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns of every optional package that it misses
    for name in WHAT_RUNS_IMPORT:
        importlib.import_module(name)
gc.freeze()  # what is here by now is never garbage, and pages that the collector does not touch stay shared
