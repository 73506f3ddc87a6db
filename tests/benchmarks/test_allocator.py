"""The model of PyTorch's caching allocator: its rules, against a slow model, and the bytes of a replay."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples

MiB = 1 << 20


@pytest.fixture(scope="module")
def model() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        return importlib.import_module("allocator")


@pytest.mark.parametrize(
    ("nbytes", "of_segments", "of_expandable"),  # allocated, reserved
    [
        (1, (512, 2 * MiB), (512, 2 * MiB)),
        (MiB, (MiB, 2 * MiB), (MiB, 2 * MiB)),
        (MiB + 1, (MiB + 512, 20 * MiB), (MiB + 512, 20 * MiB)),
        (19 * MiB + 1, (20 * MiB, 20 * MiB), (20 * MiB, 20 * MiB)),  # a rest below one MiB stays with the block
        (10 * MiB + 1, (10 * MiB + 512, 12 * MiB), (10 * MiB + 512, 20 * MiB)),
        (41 * MiB, (42 * MiB, 42 * MiB), (41 * MiB, 60 * MiB)),
    ],
)
def test_sizes_are_rounded_as_documented(model, nbytes, of_segments, of_expandable):
    for expandable, expected in ((False, of_segments), (True, of_expandable)):
        allocator = model.Allocator(expandable)
        allocator.allocate(nbytes)
        assert (allocator.allocated, allocator.reserved) == expected


def test_unequal_sizes_leave_gaps_that_expandable_segments_join(model):
    for expandable, more in ((False, 28 * MiB), (True, 0)):
        allocator = model.Allocator(expandable)
        for block in [allocator.allocate(20 * MiB) for _ in range(2)]:
            allocator.free(block)
        before = allocator.reserved
        allocator.allocate(28 * MiB)
        assert allocator.reserved - before == more
        assert allocator.missed == ({28 * MiB: 1} if more else {})


class Segments:
    """The same rules over lists: the parts of all segments as ``[size, is free]``."""

    def __init__(self):
        self.segments: list[tuple[bool, list[list]]] = []

    def allocate(self, nbytes: int) -> list:
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MiB
        parts = [
            (part[0], at, place, part)
            for at, (is_small, segment) in enumerate(self.segments)
            for place, part in enumerate(segment)
            if is_small == small and part[1] and part[0] >= size
        ]
        if parts:
            _, at, place, part = min(parts, key=lambda entry: entry[:3])
            segment = self.segments[at][1]
        else:
            whole = 2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
            segment, place, part = [[whole, True]], 0, None
            part = segment[0]
            self.segments.append((small, segment))
        rest = part[0] - size
        part[1] = False
        if rest >= 512 if small else rest > MiB:
            part[0] = size
            segment.insert(place + 1, [rest, True])
        return part

    def free(self, part: list) -> None:
        part[1] = True
        for _, segment in self.segments:
            for place in range(len(segment) - 2, -1, -1):
                if segment[place][1] and segment[place + 1][1]:
                    segment[place][0] += segment.pop(place + 1)[0]

    def bytes(self, is_free: bool) -> int:
        return sum(part[0] for _, segment in self.segments for part in segment if part[1] == is_free)


SIZES = st.sampled_from([1, 600, 512 << 10, MiB, MiB + 1, 3 * MiB, 8 * MiB, 10 * MiB, 11 * MiB, 33 * MiB, 64 * MiB])


@examples(200)
@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=60))
def test_it_does_as_the_slow_model(model, requests):
    """Each request takes memory, and then frees one of the blocks, or none."""
    fast, grown, slow, blocks = model.Allocator(), model.Allocator(expandable=True), Segments(), []
    for nbytes, number in requests:
        blocks.append((fast.allocate(nbytes), grown.allocate(nbytes), slow.allocate(nbytes)))
        if number < len(blocks):
            of_fast, of_grown, of_slow = blocks.pop(number)
            fast.free(of_fast)
            grown.free(of_grown)
            slow.free(of_slow)
        assert (fast.allocated, fast.reserved) == (slow.bytes(False), slow.bytes(False) + slow.bytes(True))
        assert grown.reserved == grown.allocated + sum(entry[0] for free in grown._free.values() for entry in free)
    for block, extended, _ in blocks:
        fast.free(block)
        grown.free(extended)
    assert fast.allocated == grown.allocated == 0 and all(len(free) <= 1 for free in grown._free.values())


def test_a_replay_takes_what_steps_hold_beside_what_was_there(model):
    event, step = model.Event, [model.Event(action=model.BEGIN)]
    kept, passing = [event(1, 4 * MiB)], [event(10, 6 * MiB), event(10), event(11, 2 * MiB)]
    actions = [event(action="0F0"), *passing, event(action="0I0"), event(11), event(12, 3 * MiB), event(12)]
    events = [*kept, *(step + actions + [event(action=model.END)]) * (model.STEPS + 1)]
    result = model.replay(events, model.Allocator())
    assert result.allocated == 6 * MiB and result.reserved == 16 * MiB
    assert result.working == 4 * MiB  # the forward ends with 2 MiB, and the backward begins with them
