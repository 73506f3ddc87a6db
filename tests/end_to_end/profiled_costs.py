"""Costs of the run ``tiny-cpu``, counted with fake tensors in a process where Megatron is set up for the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path


def write(folder: str) -> None:
    """Write ``N.json`` for 1 and for 2 context-parallel ranks."""
    from fake_profiles import fake_profile

    from megatron_pipemem.tools.config.loading import load
    from megatron_pipemem.tools.config.runs import Run

    run = load("tiny-cpu", Run)
    for cp in (1, 2):
        profile = fake_profile(run.model, replace(run.execution, cp=cp))
        Path(folder, f"{cp}.json").write_text(json.dumps(profile.to_json()))
