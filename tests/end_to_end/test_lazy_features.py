"""A run loads what it asks for: no other feature, and few modules."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("megatron.core")

MOST_MODULES = 100
_TOOLS = ("advise", "cli", "config", "explore", "launch", "megatron", "planner", "report")
UNWANTED = tuple(
    f"megatron_pipemem.{part}"
    for part in ("search", "mcore.report", "mcore.replanning", *(f"tools.{tool}" for tool in _TOOLS))
)
"""Parts of the package of which a run of a named family on CPU ranks needs no module, in addition to features."""


def test_a_run_loads_few_modules_and_a_registered_feature_runs_its_kind(ranks_without_training):
    """The run of v-half trains where no folder of a feature can be imported, and the one with the registered kind as well."""
    run = partial(ranks_without_training.run, program="lazy_features", size=2)
    plain = run({"kind": "plain"})
    for modules in (rank["modules"] for rank in plain):
        assert not [name for name in modules if name.startswith(UNWANTED)], modules
        assert len(modules) <= MOST_MODULES, modules
    registered = run({"kind": "registered"})
    assert registered[1]["losses"] == plain[1]["losses"]
    assert all(len(rank["counted"]) == len(set(rank["counted"])) * 2 for rank in registered)  # in two steps
