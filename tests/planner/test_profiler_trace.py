"""What torch.profiler recorded of stock Megatron is read, from real files (profiler/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.planner.profiler_trace import RankTrace, measured_step, read_rank
from megatron_pipemem.schedule.idle import idle_causes
from megatron_pipemem.schedule.registry import build_schedule

RECORDED = Path(__file__).parent / "profiler"
BUILT = {
    "1f1b": build_schedule("1f1b", num_devices=2, num_microbatches=4),
    "interleaved": build_schedule("interleaved", num_devices=2, num_microbatches=4, chunks=2),
}


def recorded(name: str) -> list[RankTrace]:
    return [read_rank(RECORDED / name / f"rank-{rank}.json.gz", rank) for rank in range(2)]


@pytest.mark.parametrize("name", BUILT)
def test_every_forward_and_backward_is_found(name):
    step = measured_step(recorded(name))
    assert step.schedule == BUILT[name]
    # CPU ranks of a tiny model: a pass takes some milliseconds, and messages come after they were sent.
    assert all(1e5 < end - start < 1e8 for spans in step.spans for start, end in spans)
    assert min(span[0] for spans in step.spans for span in spans) == 0
    assert all(seconds > 0 for seconds in step.links.values()) and step.links
    for each in idle_causes(step):
        assert sum(each.causes.values()) == each.idle > 0


def test_kernels_count_and_not_their_launches(tmp_path):
    """In the form in which CUDA's are written: a kernel has the correlation of its launch."""
    stack = "megatron/core/pipeline_parallel/schedules.py(397): "
    events = []
    for number, name in enumerate(("forward_step", "backward_step")):
        launch = 100.0 * number
        events += [
            {"ph": "X", "cat": "python_function", "name": stack + name, "tid": 1, "ts": launch, "dur": 10.0},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "tid": 9,
                "ts": launch + 5,
                "dur": 1.0,
                "args": {"correlation": number},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "tid": 7,
                "ts": launch + 50,
                "dur": 40.0,
                "args": {"correlation": number},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "ncclDevKernel_SendRecv",
                "tid": 8,
                "ts": launch + 95,
                "dur": 4.0,
                "args": {"correlation": number},
            },
        ]
    (tmp_path / "rank.json").write_text(json.dumps({"traceEvents": events}))
    assert [each[1:] for each in read_rank(tmp_path / "rank.json", 0).passes] == [(50_000, 90_000), (150_000, 190_000)]


def test_clocks_that_disagree_are_set_right():
    first, second = recorded("1f1b")
    straight = measured_step([first, second])
    late = second.passes
    ahead = tuple(each._replace(start=each.start - 10**9, end=each.end - 10**9) for each in late)
    moved = measured_step([first, RankTrace(second.path, 1, second.pipeline, ahead)])
    apart = [a[0] - b[0] for a, b in zip(straight.spans[1], moved.spans[1], strict=True)]
    assert len(set(apart)) == 1 and abs(apart[0]) < 10**7
    assert min(moved.links.values()) > 0


def test_ranks_that_are_missing_or_twice():
    first, second = recorded("1f1b")
    with pytest.raises(ConfigError, match="rank 1 has no trace here"):
        measured_step([first])
    with pytest.raises(ConfigError, match="two of the traces are of one rank"):
        measured_step([first, second, first])
    with pytest.raises(ConfigError, match="come in no order of Megatron's 1F1B"):
        measured_step([first, RankTrace(second.path, 1, second.pipeline, second.passes[:-1])])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "is no trace of torch.profiler"),
        ('{"traceEvents": [{"ph": "X", "dur": 1}]}', "is no trace of torch.profiler"),
        ('{"traceEvents": []}', "holds no forwards and backwards"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, says):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_rank(tmp_path / "x.json", 0)
    (tmp_path / "x.json.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read as a compressed trace"):
        read_rank(tmp_path / "x.json.gz", 0)
