"""A process that imports Megatron ends in answers, or in one sentence with a code."""

from __future__ import annotations

import pytest

from megatron_pipemem.tools.advise import programs
from megatron_pipemem.tools.megatron.asking import MARK, answers
from tests.watching.refusals import refused


def test_only_marked_lines_are_answers():
    assert answers(["-c", f"print('a log'); print('{MARK}[1]'); print('{MARK}null')"], 60, "x") == [[1], None]


@pytest.mark.parametrize(
    ("code", "program", "told"),
    [("no-answer", "import time; time.sleep(60)", ("0.5 s",)), ("not-installed", "import no_such", ("no_such",))],
)
def test_a_process_that_hangs_or_fails_is_one_sentence(code, program, told):
    with refused(code, "Megatron's parser", *told):
        answers(["-c", program], 0.5 if code == "no-answer" else 60, "Megatron's parser")


def test_a_recipe_that_takes_too_long_ends_in_a_code(monkeypatch):
    monkeypatch.setattr(programs, "_SECONDS", 0.1)
    with refused("no-answer", "Megatron-Bridge"):
        list(programs.evaluate(["llama31_70b_sft_config"]))
