"""What the full lane leaves to the nightly lane (``./scripts/test.sh --nightly``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = "thorough"
"""The hypothesis profile of the nightly lane."""


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


def examples(number: int) -> settings:
    """Return the settings of a property test that tries ``number`` examples nightly and half as many in other lanes."""
    whole = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=number if whole else number // 2)
