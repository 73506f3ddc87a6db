"""The contracts with Megatron-Core: what they list is there, and a broken one is named with its reason."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lanes import nightly

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from contracts import CONTRACTS, Verdicts, last_words  # noqa: E402

RANKS = """
    def test_trains():
>       raise CaseFailed(message)
E       ranks.CaseFailed: rank 0: Traceback (most recent call last):
E         File "training.py", line 3, in run
E           layer = Layer(config=config)
E       megatron_pipemem.errors.UpstreamError: megatron-core 0.30 has no megatron.core.layers.Linear; install another
E       rank 1: Traceback (most recent call last):
E       ValueError: later

tests/end_to_end/ranks.py:134: CaseFailed
"""
REASON = "megatron_pipemem.errors.UpstreamError: megatron-core 0.30 has no megatron.core.layers.Linear; install another"


@pytest.mark.parametrize("test", [test for contract in CONTRACTS.values() for test in contract.tests])
def test_what_is_listed_exists(test):
    path, _, name = test.partition("::")
    functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
    assert not name or name.partition("[")[0] in functions


@pytest.mark.parametrize(
    ("traceback", "reason"),
    [
        (RANKS, REASON),
        ("E   ImportError: cannot import name 'x'", "ImportError: cannot import name 'x'"),
        ("E       assert [1.0] == [2.0]", "assert [1.0] == [2.0]"),
        ("E       ranks.CaseFailed: ranks [1] wait for something", "ranks.CaseFailed: ranks [1] wait for something"),
        ("", ""),
    ],
)
def test_the_reason_is_what_a_rank_raised(traceback, reason):
    assert last_words(traceback) == reason


def report(test: str, outcome: str, when: str = "call") -> SimpleNamespace:
    told = {"longreprtext": RANKS, "longrepr": ("", 0, "no megatron.training")}
    return SimpleNamespace(nodeid=test, when=when, failed=outcome == "failed", skipped=outcome == "skipped", **told)


def test_a_contract_is_kept_when_all_of_its_tests_pass_and_broken_ones_say_why():
    chosen = {name: CONTRACTS[name] for name in ("symbols", "linear", "V", "offload")}
    verdicts = Verdicts(chosen)
    for name in ("symbols", "linear"):
        for test in chosen[name].tests:
            verdicts.pytest_runtest_logreport(report(test, "passed"))
    assert not verdicts.all_kept, "two have not been shown"
    verdicts.pytest_runtest_logreport(report(chosen["linear"].tests[-1], "failed"))
    verdicts.pytest_runtest_logreport(report(chosen["V"].tests[0], "skipped", "setup"))
    lines = verdicts.lines()
    assert lines[0].startswith("symbols     kept")
    assert lines[1].startswith("linear      BROKEN") and lines[2].strip() == REASON
    assert lines[3].startswith("V ") and lines[4].strip() == "not run: no megatron.training"
    assert lines[5].startswith("offload     BROKEN") and "no test was collected" in lines[6]


def test_a_module_that_is_gone_breaks_every_contract_that_needs_it():
    verdicts = Verdicts(CONTRACTS)
    verdicts.pytest_collectreport(report("tests/end_to_end/test_families.py", "failed", "collect"))
    assert set(verdicts.reasons) == {"linear", "V"}


@nightly("the verdicts above; mcore/test_symbols.py misses the function")
def test_a_function_that_upstream_has_lost_is_named(tmp_path):
    """From outside: on a Megatron-Core without it."""
    pytest.importorskip("megatron.core")
    (tmp_path / "sitecustomize.py").write_text(
        "from megatron.core.pipeline_parallel import schedules\ndel schedules.backward_step\n"
    )
    command = [
        sys.executable,
        str(ROOT / "scripts" / "contracts.py"),
        "--only",
        "symbols",
        "--log",
        str(tmp_path / "log"),
    ]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "ignore"}
    told = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert told.returncode == 1
    version, broken, reason, _ = told.stdout.splitlines()
    assert version.startswith("megatron-core 0.") and broken.startswith("symbols     BROKEN")
    assert "has no megatron.core.pipeline_parallel.schedules.backward_step" in reason
