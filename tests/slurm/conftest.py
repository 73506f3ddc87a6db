from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from minislurm import MiniSlurm, why_not

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def slurm() -> Iterator[MiniSlurm]:
    """Four nodes of four CPUs. What is submitted runs this checkout with this interpreter."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = MiniSlurm(folder)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "SLURM_")
    for name in [name for name in cluster.environment if name.startswith(launcher) and name != "SLURM_CONF"]:
        del cluster.environment[name]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    cluster.environment |= {
        "PIPEMEM_ROOT": str(REPOSITORY),
        "PYTHON": sys.executable,
        "PYTHONPATH": ":".join(paths),
        "PYTHONWARNINGS": "ignore",
    }
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def workplace(slurm: MiniSlurm) -> Path:
    """A folder that all nodes see."""
    folder = slurm.folder / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def submit(slurm: MiniSlurm, workplace: Path) -> Callable[..., tuple[str, Path]]:
    """``submit("name", {key: value of a run}, *options)``: the number and the log of a job on two nodes."""

    def call(name: str, changes: dict, *options: str) -> tuple[str, Path]:
        run = {
            "base": str(REPOSITORY / "configs" / "runs" / "tiny-cpu.yaml"),
            "output": str(workplace / name),
            **changes,
        }
        file = workplace / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run))
        script = REPOSITORY / "scripts" / "slurm" / "pretrain_gpt.sbatch"
        size = ["--nodes=2", f"--job-name={name}", *options]
        job = slurm.call("sbatch", "--parsable", *size, str(script), str(file), cwd=workplace)
        return job, workplace / f"{name}-{job}.log"

    return call
