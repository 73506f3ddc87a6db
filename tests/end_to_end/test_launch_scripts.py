"""A launch script trains with a line that ``pipemem advise`` prints for it: its own flags, with smaller numbers."""

from __future__ import annotations

import json
from pathlib import Path

from commands import pipemem

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


def smaller(words: list[str]) -> list[str]:
    """Return the flags of a training command for a small model on four ranks."""
    kept: list[str] = ["--num-layers", "8", "--global-batch-size", "4"]
    name = ""
    for word in words[next(place for place, word in enumerate(words) if word.endswith(".py")) + 1 :]:
        name = word if word.startswith("--") else name
        if name not in OF_TESTS:
            kept.append(word if word == name else SMALLER.get(name, word))
    return kept


def test_the_line_that_advise_prints_trains(train, equals_stock):
    """To the bit as the script itself."""
    advice = pipemem("advise", SCRIPT, "--json")
    assert advice.exit_code == 0, advice.output
    added = json.loads(advice.stdout)["ways"]["same memory"]["add"]
    place = added.index("--pipemem-schedule")
    schedule, ours = added[place + 1], [*added[:place], *added[place + 2 :]]
    flags = smaller(training_command(SCRIPT.read_text(encoding="utf-8")).words)
    equals_stock(schedule, *flags, ours=ours, nbytes=None, train=train)
