"""Host memory: what the machine allows, and a pool that never gives one byte to two and finds room while there is room."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.host import ALIGNMENT, HostPool, available_memory

BUDGET = 9000


class Ticket:
    """Of a transfer that runs after ``earlier`` ones, as the transfers of a block do."""

    def __init__(self, earlier=()):
        self.earlier = earlier
        self.over = False

    def query(self) -> bool:
        return self.over

    def end(self) -> None:
        self.over = True
        for ticket in self.earlier:
            ticket.end()

    def follows(self, other: Ticket) -> bool:
        return self is other or any(ticket.follows(other) for ticket in self.earlier)


def pool(budget: int = BUDGET, segment: int = 4096) -> HostPool:
    return HostPool(budget, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), segment)


def span(block) -> range:
    return range(block.data.data_ptr(), block.data.data_ptr() + block.nbytes)


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def power_of_two_below(nbytes: int) -> int:
    return max((1 << shift for shift in range(20) if 1 << shift <= nbytes), default=0)


def gaps(own: HostPool, held: list) -> list[int]:
    """The free runs of bytes, from the addresses of what is held."""
    blocks = []
    for segment in own._segments:
        begin, end = segment.data_ptr(), segment.data_ptr() + segment.numel()
        taken = sorted((b.data.data_ptr(), rounded(b.nbytes)) for b in held if begin <= b.data.data_ptr() < end)
        for start, size in [*taken, (end, 0)]:
            blocks.append(start - begin)
            begin = start + size
    return blocks


@examples(300)
@given(st.lists(st.one_of(st.integers(1, 3000), st.just(None)), max_size=40), st.randoms(use_true_random=False))
def test_blocks_are_private_ordered_and_within_the_budget(requests, random):
    own = pool()
    held, readers = [], []  # readers: who may still be reading which addresses
    for nbytes in requests:
        if nbytes is None:
            if held:
                block = held.pop(random.randrange(len(held)))
                readers.append((span(block), Ticket(block.after)))
                own.give(block, (readers[-1][1],))
            for _, ticket in readers:
                if random.random() < 0.3:
                    ticket.end()
            continue
        try:
            block = own.take(nbytes, "a test")
        except OffloadError:
            assert max(gaps(own, held), default=0) < nbytes, "there was room"
            assert power_of_two_below(BUDGET - own.reserved_bytes) < rounded(nbytes), "there was budget"
            continue
        assert block.nbytes == nbytes
        for other in held:
            assert not set(span(block)) & set(span(other))
        for addresses, ticket in readers:
            if not ticket.over and set(addresses) & set(span(block)):
                assert any(after.follows(ticket) for after in block.after), "written while still being read"
        held.append(block)
        assert own.used_bytes == sum(b.nbytes for b in held) <= own.reserved_bytes <= BUDGET
    for block in held:
        own.give(block, ())
    assert own.used_bytes == 0
    assert sorted(piece.size for piece in own._free) == sorted(s.numel() for s in own._segments), "merged to the whole"


def test_variable_sizes_reuse_the_same_memory():
    own = pool(4096)
    for sizes in ([4096], [1000, 2000, 700], [256] * 16, [3000, 1024]):
        blocks = [own.take(size, "a test") for size in sizes]
        for block in blocks[::2] + blocks[1::2]:
            own.give(block, ())
    assert (own.reserved_bytes, own.used_bytes) == (4096, 0)


def test_of_equal_pieces_one_that_nobody_reads_is_taken():
    own, busy = pool(4096), Ticket()
    first, between, second = (own.take(size, "a test") for size in (512, 512, 512))
    rest = own.take(4096 - 3 * 512, "a test")
    own.give(first, (busy,))
    own.give(second, ())
    assert span(own.take(512, "a test")) == span(second)
    again = own.take(512, "a test")
    assert span(again) == span(first) and again.after == (busy,)
    assert between is not None and rest is not None


def test_a_large_request_gets_a_segment_of_its_own():
    own = pool(1 << 15)
    own.take(100, "a test")
    own.take(10000, "a test")
    assert [segment.numel() for segment in own._segments] == [4096, 16384]


def test_exhaustion_names_the_purpose_and_the_numbers():
    own = pool(4096)
    blocks = [own.take(1024, "a test") for _ in range(4)]
    own.give(blocks[0], ())
    own.give(blocks[2], ())
    with refused("host-memory", 1280, "1F3", 2048, 4096, 1024, 0, kind=OffloadError):
        own.take(1024 + 1, "activations of 1F3")
    assert own.used_bytes == 2048 and 1280 % ALIGNMENT == 0


@given(st.lists(st.integers(0, 2 * BUDGET), min_size=1, max_size=4))
def test_reserved_memory_is_that_of_the_plan_within_the_budget(wanted):
    host = pool()
    for nbytes in wanted:
        host.reserve(nbytes)
    most = min(max(wanted), BUDGET)
    assert most - ALIGNMENT < host.reserved_bytes <= most


KIB = 1 << 10


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_group_of_version_2_counts(tmp_path):
    write(tmp_path, cgroup="0::/job/step")
    write(tmp_path / "root" / "job", memory__max=900 * KIB, memory__current=300 * KIB, memory__stat="anon 1")
    stat = f"anon {150 * KIB}\ninactive_file {50 * KIB}"
    write(tmp_path / "root" / "job" / "step", memory__max="max", memory__current=200 * KIB, memory__stat=stat)
    assert available_memory(tmp_path / "cgroup", tmp_path / "root") == 600 * KIB
    write(tmp_path / "root" / "job" / "step", memory__max=400 * KIB)
    assert available_memory(tmp_path / "cgroup", tmp_path / "root") == 250 * KIB, "cached files can be given up"


def test_a_container_of_version_1_has_its_limit_at_the_root(tmp_path):
    write(tmp_path, cgroup="3:cpuset:/\n4:memory:/somewhere/outside")
    names = {"memory__limit_in_bytes": 500 * KIB, "memory__usage_in_bytes": 100 * KIB}
    write(tmp_path / "root" / "memory", **names, memory__stat=f"total_inactive_file {20 * KIB}")
    assert available_memory(tmp_path / "cgroup", tmp_path / "root") == 420 * KIB


def test_a_group_that_is_full_leaves_nothing(tmp_path):
    write(tmp_path, cgroup="0::/")
    write(tmp_path / "root", memory__max=100, memory__current=200, memory__stat="anon 200")
    assert available_memory(tmp_path / "cgroup", tmp_path / "root") == 0


@pytest.mark.parametrize("cgroup", ["0::/", "7:cpu,cpuacct:/x", None])
def test_without_limits_it_is_the_machines(tmp_path, cgroup):
    if cgroup is not None:
        write(tmp_path, cgroup=cgroup)
    assert available_memory(tmp_path / "cgroup", tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
