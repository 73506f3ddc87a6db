"""Memory caps as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.memory_cap import MemoryCap, format_bytes, parse_cap


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


@pytest.mark.parametrize("text", ["lots", "", "-1", "0", "0GiB", "6GB", "6G", "nan", "inf", "1.2.3MiB"])
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(UnsupportedError, match="6GiB"):
        parse_cap(text)


@given(st.integers(1, 2**44))
def test_a_written_number_of_bytes_is_never_too_small(count):
    again = parse_cap(format_bytes(count))
    assert again.in_bytes and count <= again.amount <= 1.02 * count
