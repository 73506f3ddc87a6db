"""Ranks that differ are refused on all ranks: a grid of 2 x 2 x 2 ranks in threads, which share a store."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch.distributed as dist
from refusals import refused

from megatron_pipemem.conflicts import make_request
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import shared_settings
from megatron_pipemem.mcore.shared_settings import Meeting, RankFacts
from megatron_pipemem.request import Request

SIZE = 8
PATIENCE = 0.4


def lines(rank: int) -> dict[str, list[int]]:
    """The ranks along each of the three axes, as those of Megatron's groups."""
    along = [sorted({rank & ~bit, rank | bit}) for bit in (1, 4, 2)]
    return {str(line): line for line in along}


def meet(facts: dict[int, RankFacts]) -> dict[int, RankFacts]:
    """The facts that every rank of ``facts`` has after a meeting; the other ranks do not come."""
    store = dist.HashStore()
    with ThreadPoolExecutor(SIZE) as pool:
        meetings = [
            pool.submit(Meeting(store, rank, lines(rank), PATIENCE).exchange, own) for rank, own in facts.items()
        ]
    for rank, incomplete in zip(facts, (meeting.result() for meeting in meetings), strict=True):
        assert incomplete == [name for name, line in lines(rank).items() if not facts.keys() >= {*line}]
    return facts


@pytest.mark.parametrize("other", [0, 1, 6])
def test_all_ranks_know_the_rank_with_other_settings(other):
    met = meet({rank: RankFacts({"that" if rank == other else "this": rank}) for rank in range(SIZE)})
    expected = {"that": other, "this": 1 if other == 0 else 0}
    assert [met[rank].settings for rank in range(SIZE)] == [expected] * SIZE
    assert not any(error.missing or error.failures for error in met.values())


@pytest.mark.parametrize("missing", [{0}, {5}, {7}, {0, 7}, {1, 2}, {0, 1, 2, 3}, {1, 2, 4, 7}])
def test_all_ranks_miss_a_rank_that_does_not_come(missing):
    met = meet({rank: RankFacts({"this": rank}) for rank in range(SIZE) if rank not in missing})
    assert all(error.missing and error.missing <= missing for error in met.values())
    if len(missing) == 1:
        assert all(error.missing == missing for error in met.values())


def test_all_ranks_know_the_ranks_of_their_model():
    """A later refusal of one of them ends the others (``runtime.first_failure``), also on no line of the first."""
    members = {rank: {*itertools.chain(*lines(rank).values())} for rank in range(SIZE)}
    assert len(members[0]) < SIZE
    met = meet({rank: RankFacts({"this": rank}, ranks=members[rank]) for rank in range(SIZE)})
    assert [met[rank].ranks for rank in range(SIZE)] == [{*range(SIZE)}] * SIZE


def test_all_ranks_know_why_a_rank_cannot_go_on():
    failure = {3: ("cannot-write", "a full disk")}
    met = meet({rank: RankFacts({"this": rank}, failures=failure if rank == 3 else {}) for rank in range(SIZE)})
    assert all(error.failures == failure for error in met.values())
    for error in met.values():
        with refused("cannot-write", kind=UnsupportedError):
            shared_settings._refuse(error, {}.__getitem__, 1.0)


def settings(schedule: str = "zb-h1", **others: object) -> dict[str, str]:
    return shared_settings.shared_settings(make_request(schedule, **others))


@pytest.mark.parametrize(
    ("flag", "others"),
    [
        ("--pipemem-rng", {"rng": "layerwise"}),
        ("--pipemem-recompute", {"recompute": "full"}),
        ("--pipemem-vocab-cut", {"vocab_cut": "1"}),
        ("--pipemem-trace", {"trace": "out"}),
        ("--pipemem-memory-cap", {"memory_cap": 1.0}),
        ("train_steps", {"train_steps": 3}),
    ],
)
def test_the_refusal_names_rank_and_setting(flag, others):
    told = {"ours": settings(), "theirs": settings(**others)}
    with refused("ranks-differ", 2, 0, kind=UnsupportedError) as error:
        shared_settings._refuse(RankFacts({"ours": 0, "theirs": 2}), told.__getitem__, 1.0)
    message = str(error.value)
    assert flag in message and message.count("where rank 0 has") == 1
    shared_settings._refuse(RankFacts({"ours": 0}), told.__getitem__, 1.0)


def test_a_missing_rank_is_named():
    with refused("ranks-differ", 5, kind=UnsupportedError):
        shared_settings._refuse(RankFacts({"ours": 0}, missing={5}), {}.__getitem__, 1.0)


def test_versions_are_compared(monkeypatch):
    before = settings()
    monkeypatch.setattr("megatron.core.__version__", "0.99.0")
    after = settings()
    assert {name for name in before if before[name] != after[name]} == {"megatron-core"}
    assert "megatron_pipemem" in before


def test_every_setting_is_compared_and_no_text_depends_on_the_process():
    digests = settings()
    assert len(digests) == len(fields(Request)) + 2
    assert not any(" at 0x" in text for text in digests.values())


def test_contents_of_files_are_compared_and_their_folders_are_not(tmp_path):
    texts = []
    for folder, forward in itertools.product(("here", "there"), (1, 2)):
        path = tmp_path / folder / "costs.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"forward": forward, "backward_input": 1, "backward_weight": 1}))
        texts.append(settings(costs=str(path), report=str(tmp_path / folder)))
    assert texts[0] == texts[2] and texts[1] == texts[3]
    assert {name for name in texts[0] if texts[0][name] != texts[1][name]} == {"--pipemem-costs"}
