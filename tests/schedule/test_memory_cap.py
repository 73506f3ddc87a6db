"""Memory caps as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.memory_cap import MemoryCap, format_bytes, parse_bytes, parse_cap, parse_caps


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
