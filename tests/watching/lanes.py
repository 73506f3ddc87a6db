"""Marks of tests that only the nightly lane runs (``./scripts/test.sh --nightly``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(instead: str) -> pytest.MarkDecorator:
    """Leave a test, or all tests of a file, to the nightly lane. ``instead`` names tests that find the same faults."""
    return pytest.mark.nightly(instead)


def rest_nightly(cases: Iterable[Any], kept: Collection[Any], instead: str) -> list[Any]:
    """Return the cases of ``parametrize``. The full lane runs only those in ``kept``.

    ``instead`` names tests of the full lane that find the faults of the other cases.
    """
    cases = [*cases]
    lost = [case for case in kept if case not in cases]
    assert not lost, f"no cases: {lost}"
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=nightly(instead))
        for case in cases
    ]
