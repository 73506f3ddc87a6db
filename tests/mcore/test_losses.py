"""Losses on their way to the last rank: two ends in one process, joined by a first-in-first-out channel."""

from __future__ import annotations

import copy
from collections import deque
from typing import NamedTuple

import pytest
import torch
from streams import Group, Streams

from megatron_pipemem.mcore.step import losses
from megatron_pipemem.mcore.step.losses import LossCarrier


class _Done:
    def wait(self) -> None: ...


class _End:
    """One rank's view of a group whose messages wait in ``sent``."""

    def __init__(self, rank: int, size: int, sent: dict[tuple[int, int], deque]):
        self._rank, self._size, self.sent = rank, size, sent

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors, peer, tag):
        self.sent.setdefault((self._rank, peer), deque()).append(tensors[0].clone())
        return _Done()

    def recv(self, tensors, peer, tag):
        arrived = self.sent[peer, self._rank].popleft()
        assert arrived.shape == tensors[0].shape and arrived.dtype == tensors[0].dtype
        tensors[0].copy_(arrived)
        return _Done()


@pytest.fixture
def ends(monkeypatch):
    """``ends(size)``: all ranks of a group. Objects travel on the same channels as tensors, and are counted."""
    sent: dict[tuple[int, int], deque] = {}
    objects = []

    def send_objects(payload, peer, group):
        objects.append(payload)
        sent.setdefault((group.rank(), peer), deque()).append(copy.deepcopy(payload))

    def receive_objects(payload, peer, group):
        payload[:] = sent[peer, group.rank()].popleft()

    monkeypatch.setattr(losses.dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(losses.dist, "send_object_list", send_objects)
    monkeypatch.setattr(losses.dist, "recv_object_list", receive_objects)
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(losses.torch.cuda, name, _NoStream)
    monkeypatch.setattr(losses.torch.cuda, "current_device", lambda: "cpu")
    made = lambda size: [_End(rank, size, sent) for rank in range(size)]  # noqa: E731
    made.objects, made.sent = objects, sent
    return made


class _NoStream:
    def __init__(self, *_): ...

    def wait_stream(self, stream) -> None: ...

    def __enter__(self): ...

    def __exit__(self, *_): ...


class Report(NamedTuple):
    loss: torch.Tensor
    name: str


def data(step: int) -> dict:
    return {
        "lm loss": [torch.tensor(0.1 + step), torch.tensor([step, 7], dtype=torch.int64)],
        "mask": (torch.tensor([True, False]), 3, "text"),
        "half": torch.full((2, 3), step, dtype=torch.bfloat16),
        "report": Report(torch.tensor(float(step), dtype=torch.float64), "report"),
        "none": torch.empty(0, 4),
    }


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor) and one.is_nested:
        return not one.requires_grad and same([*one.unbind()], [*other.unbind()])
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def jagged(step: int) -> dict:
    """Of another layout, as verl's log-probabilities of a microbatch are."""
    parts = [torch.full((length,), step / 3, requires_grad=True) for length in (3, 1 + step)]
    return {"log_probs": torch.nested.as_nested_tensor(parts, layout=torch.jagged), "loss": torch.tensor(step)}


SHAPES = [{"lm loss": torch.ones(3)}, {"lm loss": torch.zeros(3)}, [], {"lm loss": 1.5}, {"lm loss": 2.5}]


@pytest.mark.parametrize(
    ("sent", "of_new_structure"),
    [
        ([data(step) for step in range(4)], 1),
        ([data(0), *SHAPES, data(1)], 6),
        ([jagged(step) for step in range(3)], 3),
    ],
    ids=["the same structure", "other structures", "another layout"],
)
def test_data_arrive_and_their_structure_travels_when_it_is_new(ends, sent, of_new_structure):
    """What looks the same as before travels as one message of tensors."""
    source, last = (LossCarrier(end) for end in ends(2))
    for message in sent:
        source.send(message, 1, "training")
        assert same(last.receive(0, "training"), message)
        assert not any(ends.sent.values())
    assert len(ends.objects) == of_new_structure


@pytest.fixture
def received(monkeypatch):
    """Receive four reports of losses on simulated streams, and compute with each."""

    def receive() -> Streams:
        with Streams() as gpu:
            monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
            monkeypatch.setattr(losses.torch.cuda, "current_device", lambda: "cpu")
            group = Group("losses", rank=1)
            # What arrives says that it looks as the report before it.
            group.recv = lambda tensors, peer, tag, post=group.recv: (tensors[0].fill_(1), post(tensors, peer, tag))[1]
            carrier = LossCarrier(group)
            carrier._last_forms[0, 1, "training"] = losses._structure([torch.ones(3)])
            for _ in range(4):
                sum(carrier.receive(0, "training")) * 2
        return gpu

    return receive


def test_losses_arrive_on_one_stream_without_a_race(received):
    gpu = received()
    assert not gpu.findings
    assert len(gpu.streams) == 3, "of computing, of the group, and of all losses of the run"


def test_losses_that_are_not_kept_for_their_readers_are_found(monkeypatch, received):
    monkeypatch.setattr(Streams, "_record_stream", staticmethod(lambda tensor, stream: None))
    assert received().kinds() == {"free"}
