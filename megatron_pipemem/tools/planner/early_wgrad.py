"""Runs whose weight gradients do not wait as the schedule says: W runs earlier, or pass I computes the head's."""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.model.counts import early_modules
from megatron_pipemem.schedule.options import AUTO, EARLY_WGRAD, OFF
from megatron_pipemem.tools.config.runs import RECOMPUTE_FLAG, Run


def with_early_head(run: Run) -> Run:
    """Return the run with the head among the modules whose weight gradients pass I computes."""
    modules = early_modules(run.model, run.execution)
    named = ",".join(name for name in EARLY_WGRAD if name in modules or name == "head")
    return replace(run, schedule=replace(run.schedule, early_wgrad=named))


def moves_weights(run: Run) -> bool:
    """Return whether a run of a family's schedule has W earlier where a rank would hold more than 1F1B's fullest.

    ``choose`` moves them (``schedule.earlier_weights``), if the vocabulary is uncut and nothing else frees memory.
    """
    choice = run.schedule
    frees = choice.offload != OFF or choice.recomputes_by_action or run.flags.get(RECOMPUTE_FLAG, "none") != "none"
    return choice.early_wgrad == AUTO and run.parallelism.pp > 1 and not frees
