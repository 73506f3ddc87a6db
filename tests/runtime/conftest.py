from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from streams import Streams


@pytest.fixture
def gpu() -> Iterator[Streams]:
    """The stream sanitizer, switched on for the test. The test fails if it has found anything."""
    from streams import Streams

    with Streams() as streams:
        yield streams
    assert not streams.found
