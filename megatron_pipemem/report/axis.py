"""Choose which stretches of time a picture shows of its runs, and on what scale."""

from __future__ import annotations

from collections.abc import Sequence

LEFT, RIGHT = 0.8, 0.75
"""Inches beside the time axis, for the devices' names and their peaks."""
GAP = 0.02
"""Between two windows of a run, in parts of their width."""
_NARROWEST, _WIDEST = 9.0, 24.0
_COMFORTABLE, _CROWDED = 7.5, 2.5
"""Points of the shortest action: enough for a two-digit label; too few to tell actions apart."""

Window = tuple[float, float]
Windows = tuple[Window, ...]


def page(ends: Sequence[float], shortest: float) -> tuple[float, Windows]:
    """Return inches of width, and the stretches of time that are drawn: all of it, or the two ends of a crowded run."""
    longest = max(ends)
    width = min(_WIDEST, max(_NARROWEST, longest / shortest * _COMFORTABLE / 72 + LEFT + RIGHT))
    points = (width - LEFT - RIGHT) * 72
    if longest / shortest * _CROWDED <= points:
        return width, ((0.0, longest),)
    length = points / 2 / _COMFORTABLE * shortest
    last = min(longest - length, max(length, min(ends) - length / 3))  # an earlier end is seen too, if that is near
    last = max(last, longest - 2 * length)
    return width, ((0.0, length), (last, longest))


def both_ends(end: float, windows: Windows) -> Windows:
    """Return the first and the last stretch of a long run, together as long as the stretches that others are drawn in."""
    half = sum(stop - start for start, stop in windows) / (2 + (GAP if len(windows) == 1 else 0))
    return (0.0, half), (end - half, end)


def points_per_second(width: float, windows: Windows) -> float:
    """Return the width of one second in points."""
    return (width - LEFT - RIGHT) * 72 / sum(end - start for start, end in windows)


def cut_out(runs: Sequence[tuple[str, float, Windows]]) -> list[str]:
    """Return the times that do not stand in the picture, from the names, ends and windows of its runs."""
    gaps: dict[Windows, list[tuple[str, float]]] = {}
    for name, end, windows in runs:
        if len(windows) > 1 and windows[1][0] > windows[0][1]:
            gaps.setdefault(windows, []).append((name, end))
    notes = []
    for windows, cut in gaps.items():
        share = 1 - sum(stop - start for start, stop in windows) / max(end for _, end in cut)
        of = "the run" if len(cut) == len(runs) else " and ".join(name for name, _ in cut)
        notes.append(f"time {windows[0][1]:.5g} to {windows[1][0]:.5g} ({share:.0%} of {of})")
    return notes
