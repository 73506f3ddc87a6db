"""Host memory within the limits of control groups, over made-up folders."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from megatron_pipemem.features.offload.runtime.host import available_memory

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
