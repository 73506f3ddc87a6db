"""Check that the installed Megatron-Core has the properties that this package needs, its *contracts*.

python scripts/contracts.py [--only CONTRACT ...] [--log FILE] [--verbose]

Tests of the package prove each contract. They train on four CPU ranks if needed, and compare with that Megatron's own
schedule. A broken contract is printed with its reason in one line, and the log has the details. ``contracts.sh`` checks
another version or source tree.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_pipemem.mcore.symbols import SELECT_SEGMENT_OF_GROUPS, ModelClass
from megatron_pipemem.tools.cpu import ignore_missing_packages

ROOT = Path(__file__).resolve().parents[1]


class Contract(NamedTuple):
    """A property of Megatron-Core that the package needs, and the tests that prove it."""

    promise: str  # the property, as a sentence
    tests: tuple[str, ...]
    option: str | None = None  # a field of Megatron's TransformerConfig, without which there is nothing to check
    part: ModelClass | None = None  # likewise a part of Megatron


_FAMILIES, _TRAINING = "tests/end_to_end/test_families.py", "tests/end_to_end"
CONTRACTS = {
    "symbols": Contract(
        "every function that is replaced or used is there, with its parameters", ("tests/mcore/test_symbols.py",)
    ),
    "flags": Contract(
        "every flag is judged in tests/mcore/megatron_flags.yaml",
        ("tests/mcore/test_megatron_flags.py::test_every_flag_of_megatron_stands_in_the_table_once",),
    ),
    "linear": Contract(
        "a split backward on one chunk per rank (zb-h1) trains as stock, and its peak bytes are as predicted",
        (f"{_FAMILIES}::test_trains_as_stock[zb-h1]",),
    ),
    "V": Contract(
        "a V placement (v-half) trains as stock, and its peak bytes are as predicted",
        (f"{_FAMILIES}::test_trains_as_stock[v-half]",),
    ),
    "offload": Contract(
        "activations that wait on the host (zbv) change nothing but memory, by as many bytes as predicted",
        (f"{_TRAINING}/test_offload.py::test_everything_that_fits_leaves_a_v",),
    ),
    "vocabulary": Contract(
        "embedding and head cut over the ranks (v-half, algorithm 2) train as stock to 1e-6",
        (f"{_TRAINING}/test_vocabulary.py::test_placements_train_as_stock[v-half-2]",),
    ),
    "slices": Contract(
        "sequences in slices (zb-h1) train as whole ones to 1e-6, also their further tokens",
        (f"{_TRAINING}/test_slices.py::test_trains_as_stock[further tokens, per token]",),
    ),
    "graphs": Contract(
        "passes up to the experts in CUDA graphs of their own (zb-h1, a stand-in of graphs) train as without graphs",
        (f"{_TRAINING}/test_pass_graphs.py::test_trains_as_without_graphs[experts]",),
    ),
    "hybrid": Contract(
        "a HybridModel trains as stock under zb-h1 and v-half",
        (
            f"{_TRAINING}/test_hybrid.py::test_trains_as_stock[zb-h1]",
            f"{_TRAINING}/test_hybrid.py::test_trains_as_stock[v-half]",
        ),
    ),
    "hybrid-gpt": Contract(
        "a GPT's checkpoint goes on in a HybridModel under v-half",
        (f"{_TRAINING}/test_hybrid.py::test_a_checkpoint_of_a_gpt_goes_on_as_the_gpt[v-half]",),
        part=ModelClass("megatron.training.checkpointing", "_maybe_setup_gpt_to_hybrid_load"),
    ),
    "hybrid-mtp": Contract(
        "a HybridModel with multi-token prediction trains as stock in a V, and logs its losses",
        (f"{_TRAINING}/test_multi_token.py::test_hybrid_models_predict_further_too[whole]",),
    ),
    "groups": Contract(
        "a HybridModel with groups of layers in its pattern trains as stock in a V",
        (f"{_TRAINING}/test_branches.py::test_groups_of_layers_train_as_stock",),
        part=SELECT_SEGMENT_OF_GROUPS.of,
    ),
    "streams": Contract(
        "layers with several residual streams (mHC) train as stock, and their peak bytes are as predicted",
        (f"{_TRAINING}/test_branches.py::TestResidualStreams",),
        "enable_hyper_connections",
    ),
    "compressed": Contract(
        "compressed sparse attention (dsv4_hybrid) in PyTorch trains as stock, also with several residual streams",
        (f"{_TRAINING}/test_branches.py::test_compressed_attention_trains_as_stock",),
        "csa_compress_ratios",
    ),
    "mixing": Contract(
        "mixed hidden states of multi-token prediction train as stock, also recomputed",
        (f"{_TRAINING}/test_branches.py::test_mixed_hidden_states_draw_the_same_again",),
        "mtp_hsm",
    ),
}


@dataclass(eq=False)
class Verdicts:
    """A pytest plugin that collects the results of tests by contract."""

    contracts: dict[str, Contract]
    passed: set[str] = field(default_factory=set)
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            for name, contract in self.contracts.items():
                if any(test.startswith(report.nodeid) for test in contract.tests):
                    self.reasons.setdefault(name, []).append(last_words(report.longreprtext))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, contract in self.contracts.items():
            if any(report.nodeid.startswith(test) for test in contract.tests):
                if report.failed:
                    self.reasons.setdefault(name, []).append(last_words(report.longreprtext))
                elif report.skipped:
                    self.reasons.setdefault(name, []).append(f"not run: {report.longrepr[2]}")  # type: ignore[index]  # of a skip: file, line, reason
                elif report.when == "call":
                    self.passed.add(name)

    def lines(self) -> list[str]:
        """Return a line for each contract, and below a broken one a line for each reason."""
        told = []
        for name, contract in self.contracts.items():
            reasons = list(dict.fromkeys(self.reasons.get(name, ())))
            if not reasons and name in self.passed:
                told.append(f"{name:<12}kept    {contract.promise}")
                continue
            told.append(f"{name:<12}BROKEN  does not hold: {contract.promise}")
            told += [f"{'':<20}{reason}" for reason in reasons or ["no test was collected; see the log"]]
        return told

    @property
    def all_kept(self) -> bool:
        """Whether a test has passed for each contract, and none has failed or was skipped."""
        return not self.reasons and self.passed == set(self.contracts)


def last_words(traceback: str) -> str:
    """Return the error of a failed test as one line, from the first rank that reports an error.

    ``traceback`` is pytest's. Its lines after ``E`` may hold the tracebacks of several ranks.
    """
    lines = [line[1:].strip() for line in traceback.splitlines() if line.startswith("E  ")]
    errors = [line for line in lines if _is_error(line)]
    raised = [line for line in errors if not line.startswith("ranks.CaseFailed")]
    return (raised or errors or lines or traceback.splitlines() or [""])[0]


def _is_error(line: str) -> bool:
    """Return whether a line begins with the name of an exception: ``package.SomeError: message``."""
    name = line.partition(":")[0]
    return name.replace(".", "").isidentifier() and name.rpartition(".")[2][:1].isupper()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTRACTS, default=list(CONTRACTS), help="default: all")
    parser.add_argument("--log", type=Path, default=Path("out/contracts.log"), help="file for pytest's output")
    parser.add_argument("--verbose", action="store_true", help="log Megatron's warnings about missing GPU packages")
    asked = parser.parse_args()
    if not asked.verbose:
        ignore_missing_packages()
    log = asked.log.resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        import megatron.core
        from megatron.core.transformer import TransformerConfig

        def is_there(contract: Contract) -> bool:
            has_part = contract.part is None or contract.part.find() is not None
            return has_part and hasattr(TransformerConfig, contract.option or "num_layers")

        verdicts = Verdicts({name: CONTRACTS[name] for name in asked.only if is_there(CONTRACTS[name])})
        tests = [test for contract in verdicts.contracts.values() for test in contract.tests]
        pytest.main(["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", *tests], plugins=[verdicts])
    version = megatron.core.__version__.partition("+")[0]  # the rest is the commit of the repository around it
    print(f"megatron-core {version} of {Path(megatron.core.__file__).parent}")
    print("\n".join(verdicts.lines()))
    print(f"{time.perf_counter() - began:.0f} s; log: {log}")
    return 0 if verdicts.all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
