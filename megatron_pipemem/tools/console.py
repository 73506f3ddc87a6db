"""The console that prints for people. Text from files and flags cannot control the terminal through it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from megatron_pipemem.errors import printable


class Console(RichConsole):
    """A console of rich that prints control characters in texts as escape sequences, such as ``\\x1b``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False} | settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of rich, with printable texts."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
