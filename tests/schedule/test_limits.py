"""Numbers that users give, as text of flags, and as values of files and programs."""

from __future__ import annotations

import math

import pytest
from refusals import refused

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.model.model import Model
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.options import COUNT, NOT_NEGATIVE, POSITIVE, WHOLE, Limit, check_effort

PORT = Limit(1, 65535)


@pytest.mark.parametrize(
    ("limit", "value", "number"),
    [
        (WHOLE, "-3", -3),
        (WHOLE, 10**29, 10**29),  # as an int, whose digits a float would lose
        (COUNT, 2.0, 2),
        (PORT, "65535", 65535),
        (NOT_NEGATIVE, "0", 0.0),
        (POSITIVE, ".5", 0.5),
        (Limit(most=math.inf), "inf", math.inf),
    ],
)
def test_a_number_is_read_from_itself_or_its_text(limit, value, number):
    read = limit.read("--flag", value)
    assert read == number and type(read) is type(number)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        *((COUNT, value, ("--flag", 1)) for value in (0, -1, 2.5, "8.0", "1e3", "x", "", None, [1], True, math.nan)),
        (COUNT, math.inf, ("--flag",)),
        (COUNT, 10**400, ("--flag", 401)),
        (COUNT, "9" * 5000, ("--flag",)),
        (PORT, 65536, ("--flag", 65536, "65,535")),
        (NOT_NEGATIVE, -1.0, ("--flag", -1, 0)),
        (POSITIVE, 0, ("--flag", 0)),
        (POSITIVE, 10**400, ("--flag",)),
        (POSITIVE, math.inf, ("--flag",)),
    ],
)
def test_all_else_is_refused_by_one_error(limit, value, words):
    with refused("bad-number", *words, kind=UnsupportedError):
        limit.read("--flag", value)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Request("1f1b", vocab_parallel="1", vocab_piece_tokens="x"),
        lambda: Request("1f1b", offload_options={"ratio": "x"}),
        lambda: check_effort("x"),
        lambda: add_virtual_stages(*take_flags("--num-layers x --pipemem-schedule 1f1b".split())),
        lambda: add_virtual_stages(
            *take_flags("--pipeline-model-parallel-size 2 --micro-batch-size x --pipemem-schedule 1f1b".split())
        ),
    ],
)
def test_flags_options_and_arguments_are_read_alike(ask):
    with refused("bad-number", "'x'", kind=UnsupportedError):
        ask()


def test_a_field_of_a_file_is_named_by_its_key():
    with refused("bad-number", "layers", 0, 1, kind=ConfigError):
        Model(layers=0, hidden=64, heads=4, sequence=64, vocabulary=100)
