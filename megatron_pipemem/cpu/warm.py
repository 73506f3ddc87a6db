"""Import Megatron and call `cpu.activate`, in the process from which ranks are forked (see ``ranks``)."""

from __future__ import annotations

import gc
import importlib
import warnings

from megatron_pipemem.cpu import activate

WHAT_RUNS_IMPORT = (
    "megatron.training.training",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",
    "torch._dynamo",  # every optimizer imports it
    "megatron_pipemem.mcore.launch",
    "megatron_pipemem.mcore.plugin",
    "megatron_pipemem.mcore.report.recording",
    "megatron_pipemem.report.figure",
)

activate()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns about every missing optional package
    for name in WHAT_RUNS_IMPORT:
        importlib.import_module(name)
gc.freeze()  # these objects are never garbage, and pages that the collector does not touch stay shared
