"""A run loads what it asks for: no other feature, and few modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks

pytest.importorskip("megatron.core")

MOST_MODULES = 100
UNWANTED = ("advise", "cli", "launch", "planner", "search", "mcore.report", "mcore.replanning")
"""Parts of the package of which a run of a named family needs no module, beside those of features."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    ranks = Ranks("lazy_features", tmp_path_factory.mktemp("lazy_features"), size=2, forked=False)
    yield ranks
    ranks.stop()


def test_a_run_loads_few_modules_and_a_registered_feature_runs_its_kind(ranks):
    """The run of v-half trains where no folder of a feature can be imported, and the one with the registered kind as well."""
    plain = ranks.run({"kind": "plain"})
    for each in plain:
        modules = each["modules"]
        assert not [name for name in modules if name.startswith(UNWANTED)], modules
        assert len(modules) <= MOST_MODULES, modules
    registered = ranks.run({"kind": "registered"})
    assert registered[1]["losses"] == plain[1]["losses"]
    assert all(len(each["counted"]) == len(set(each["counted"])) * 2 for each in registered)  # in two steps
