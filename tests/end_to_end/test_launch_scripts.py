"""A launch script trains with every line that ``pipemem advise`` prints for it: its own flags, with smaller numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import pipemem
from lanes import rest_nightly

from megatron_pipemem.tools.advise.shell import training_command

SCRIPT = Path(__file__).parents[2] / "examples" / "launch_before.sh"
SMALLER = {
    "--ffn-hidden-size": "96",
    "--num-query-groups": "2",
    "--moe-ffn-hidden-size": "64",
    "--lr-warmup-iters": "0",
}
OF_TESTS = """
--hidden-size --num-attention-heads --seq-length --max-position-embeddings --micro-batch-size --global-batch-size --lr
--min-lr --train-iters --clip-grad --eval-interval --eval-iters --tokenizer-type --tokenizer-model --data-path --split
--attention-dropout --hidden-dropout --save --load --save-interval --log-interval --bf16 --tensor-model-parallel-size
--sequence-parallel --expert-model-parallel-size --num-layers
""".split()
"""Flags that the tests' own runs set, or that need more than four CPU ranks."""


def smaller(words: list[str], layers: int) -> list[str]:
    """Return the flags of a training command for a small model on four ranks."""
    kept: list[str] = ["--num-layers", str(layers), "--global-batch-size", "4"]
    name = ""
    for word in words[next(place for place, each in enumerate(words) if each.endswith(".py")) + 1 :]:
        name = word if word.startswith("--") else name
        if name not in OF_TESTS:
            kept.append(word if word == name else SMALLER.get(name, word))
    return kept


@pytest.fixture(scope="module")
def ways() -> dict[str, dict]:
    """The answers of ``pipemem advise`` for the script."""
    found = pipemem("advise", SCRIPT, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)["ways"]


@pytest.mark.parametrize(
    "kind",
    rest_nightly(
        ["same memory, chunks", "less memory", "stock"],
        ["less memory"],
        "test_statements_that_advise_prints_for_a_recipe_train, and the families' own tests",
    ),
)
def test_the_line_that_advise_prints_trains(train, assert_same_training, ways, kind):
    """To the bit as the script itself. A line with a layout needs all of the script's 80 layers."""
    added = ways[kind]["add"]
    layers = 80 if any("layout" in word for word in added) else 8
    flags = smaller(training_command(SCRIPT.read_text(encoding="utf-8")).words, layers)
    schedule = "stock"
    if "--pipemem-schedule" in added:
        place = added.index("--pipemem-schedule")
        schedule, added = added[place + 1], [*added[:place], *added[place + 2 :]]
    assert_same_training(train(schedule, *flags, *added), train("stock", *flags))
