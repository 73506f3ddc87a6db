"""Numbers and memory caps that users give, as text of flags, and as values of files and programs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.model.model import Model
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.memory_cap import MemoryCap, format_bytes, parse_bytes, parse_cap, parse_caps
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
        lambda: Request("1f1b", vocab_cut="1", vocab_piece_tokens="x"),
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


# ---------------------------------------------------------------------------------------------------------- memory caps


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("0.6", MemoryCap(0.6, False)),
        (0.6, MemoryCap(0.6, False)),
        (1, MemoryCap(1.0, False)),
        ("6GiB", MemoryCap(6 * 2**30, True)),
        ("1.5GiB", MemoryCap(1.5 * 2**30, True)),
        ("800 MiB", MemoryCap(800 * 2**20, True)),
        ("64KiB", MemoryCap(64 * 2**10, True)),
        ("123456B", MemoryCap(123456, True)),
    ],
)
def test_reads_units_and_bytes(text, cap):
    assert parse_cap(text) == cap


@pytest.mark.parametrize(
    "text", ["lots", "", "-1", "0", "0GiB", "6GB", "6G", "nan", "inf", "1.2.3MiB", "1e308", "1e308B"]
)
def test_anything_else_is_refused_with_examples(text):
    with refused("bad-number", kind=UnsupportedError):
        parse_cap(text)


def test_one_cap_per_device():
    assert parse_caps("0.5, 0.6") == MemoryCap((0.5, 0.6), False)
    assert parse_caps("6GiB,8GiB").of(2) == (6 * 2**30, 8 * 2**30)
    assert parse_caps(0.5) == MemoryCap(0.5, False) and parse_caps("0.5").of(3) == (0.5,) * 3
    assert str(parse_caps("0.5,0.6")) == "0.5, 0.6 activation units"
    assert str(parse_caps("1GiB,2GiB")) == "1.00GiB, 2.00GiB"
    with refused("wrong-count", 2, 3, kind=UnsupportedError):
        parse_caps("0.5,0.6").of(3)
    with refused("unit-mismatch", kind=UnsupportedError):
        parse_caps("0.5,6GiB")
    with refused("bad-number", "0.5", "0.6", kind=UnsupportedError):
        parse_cap("0.5,0.6")


@given(st.integers(1, 2**44))
def test_a_written_number_of_bytes_is_never_too_small(count):
    again = parse_cap(format_bytes(count))
    assert again.in_bytes and count <= again.amount <= 1.02 * count


@pytest.mark.parametrize(
    ("text", "hint"),
    [("60gb", "60GiB"), ("6G", "6GiB"), ("-1GiB", None)],
)
def test_bytes_are_counted_in_units_of_two_to_the_ten(text: str, hint: str | None) -> None:
    with refused("bad-number", "--memory", text, hint or "60GiB", kind=UnsupportedError):
        parse_bytes("--memory", text)
    if hint:
        with refused("bad-number", hint, kind=UnsupportedError):
            parse_cap(text)
