"""Messages: which process group carries them, and when their memory may go. No process group is opened here."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import rest_nightly
from refusals import refused
from streams import is_of_allocator
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.runtime import transport
from megatron_pipemem.runtime.executor import Executor, rank_program
from megatron_pipemem.runtime.transport import (
    MessageFormat,
    Pipeline,
    Transport,
    colour,
    connect,
    edges,
    polls_departures,
)
from megatron_pipemem.schedule.action import MESSAGES, SENDS, Action, Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.message_memory import sent_bytes
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program

FAMILIES = {family.name: family for family in families()}


def sticks(program: Program, group_of: dict[tuple[int, int], int]) -> bool:
    """Whether a rank that serves all it posts to a group strictly in order waits for ever."""
    placement = program.placement
    router = Router(placement)

    def message(action: Action) -> tuple[tuple[int, int], tuple[str, int, int | None]]:
        """Its edge, and a name that both ends give it."""
        here = action.stage
        neighbour = placement.next_stage if action.kind in (Kind.SEND_F, Kind.RECV_I) else placement.previous_stage
        there = neighbour(here)
        source, destination = (here, there) if action.kind in SENDS else (there, here)
        devices = placement.devices
        return (devices[source], devices[destination]), (action.kind.value[-1], source, action.microbatch)

    queues: dict[tuple[int, int], deque] = defaultdict(deque)
    arrived = set()
    at = [0] * placement.num_devices
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(program.actions):
            while at[device] < len(actions):
                action = actions[at[device]]
                if action.kind in MESSAGES:
                    edge, name = message(action)
                    queues[device, group_of[edge]].append(name)
                elif (receive := router.awaited(action)) is not None and message(receive)[1] not in arrived:
                    break
                at[device] += 1
                moved = True
        for (source, destination), group in group_of.items():
            sent, wanted = queues[source, group], queues[destination, group]
            while sent and wanted and sent[0] == wanted[0]:
                arrived.add(sent.popleft())
                wanted.popleft()
                moved = True
    return any(map(len, queues.values())) or at != [len(actions) for actions in program.actions]


@pytest.mark.parametrize(
    ("name", "most"), rest_nightly(product(FAMILIES, (5, 8)), [*product(FAMILIES, (5,))], "smaller pipelines here")
)
def test_no_schedule_sticks_where_a_rank_serves_a_group_in_order(name, most):
    """On up to ``most`` devices."""
    played = 0
    for p in range(max(2, FAMILIES[name].min_devices), most + 1):
        fewest = FAMILIES[name].fewest_microbatches(p)
        for m in sorted({fewest, p, 2 * p, 2 * p + 1}):
            try:
                schedule = build_schedule(name, num_devices=p, num_microbatches=m)
            except UnsupportedError:  # the family wants other numbers
                continue
            group_of = colour(edges(schedule.placement))
            assert not sticks(lower(schedule), group_of), (p, m)
            assert not sticks(lower(schedule.forward_only()), group_of), (p, m)
            played += 1
    assert played


@pytest.mark.parametrize("name", ["gis", "gis-h", "po-h", "po-f"])
def test_two_groups_one_per_direction_would_stick(name):
    program = lower(build_schedule(name, num_devices=4, num_microbatches=8))
    assert sticks(program, {edge: int(edge[0] > edge[1]) for edge in edges(program.placement)})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda edge: edge[0] != edge[1]), unique=True))
def test_edges_of_one_colour_share_no_device(directed):
    colours = colour(directed)
    assert [*colours] == directed
    used = Counter((number, device) for edge, number in colours.items() for device in edge)
    assert all(times == 1 for times in used.values())
    crowd = max(Counter(device for edge in directed for device in edge).values(), default=1)
    assert {*colours.values()} <= set(range(2 * crowd - 1))


@pytest.mark.parametrize("p", range(2, 9))
def test_groups_do_not_grow_in_number_with_the_pipeline(p):
    def groups(placement: Placement) -> int:
        return len({*colour(edges(placement)).values()})

    line = 2 if p == 2 else 4
    assert {
        groups(placement) for placement in (Placement.linear(p), Placement.wave(p, 4), Placement.bidirectional(p))
    } == {line}
    assert groups(Placement.interleaved(p, 2)) == (6 if p % 2 else line)


def test_channels_open_on_the_device_of_the_messages(monkeypatch):
    """A group over two backends takes the one of the tensor's device, and each opens at its first message."""
    opened = {}

    def new_groups(wanted, parent, description, *, max_ctas):
        assert max_ctas == transport.MESSAGE_CTAS
        opened.update(enumerate(wanted))
        return range(len(wanted))

    hellos = []
    monkeypatch.setattr(transport, "new_groups", new_groups)
    monkeypatch.setattr(transport.dist, "get_process_group_ranks", lambda group: [7, 5, 3, 1])
    for call in ("send", "recv"):
        monkeypatch.setattr(
            transport.dist,
            call,
            lambda tensor, peer, group, call=call: hellos.append((call, peer, group, tensor.device.type)),
        )
    pipeline = connect(Placement.linear(4), SimpleNamespace(rank=lambda: 1), "meta")
    assert pipeline.channels == {(0, 1): 0, (1, 0): 1, (1, 2): 2, (2, 1): 3}
    assert opened == {0: [1, 3, 5, 7], 1: [1, 3, 5, 7], 2: [3, 5], 3: [3, 5]}
    assert hellos == [("recv", 7, 0, "meta"), ("send", 7, 1, "meta"), ("send", 3, 2, "meta"), ("recv", 3, 3, "meta")]


PLACEMENTS = {
    "line": Placement.linear,
    "V": Placement.v_shape,
    "wave": lambda p: Placement.wave(p, 4),
    "two directions": Placement.bidirectional,
    "ring": lambda p: Placement.interleaved(p, 2),
}


@pytest.mark.parametrize("p", [4, 5, 8, 13, 16, 32, 64])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_edges_of_a_pipeline_open_in_a_few_rounds(monkeypatch, name, p):
    """A device opens one edge at a time, in its own order. An edge opens in one round, if both of its ends are at it."""
    openings = []

    def note(tensor, peer, group):
        openings[-1].append((group, frozenset((device, peer))))

    monkeypatch.setattr(transport, "new_groups", lambda members, *_, **__: range(len(members)))
    monkeypatch.setattr(transport.dist, "get_process_group_ranks", lambda group: [*range(p)])
    monkeypatch.setattr(transport.dist, "send", note)
    monkeypatch.setattr(transport.dist, "recv", note)
    placement = PLACEMENTS[name](p)
    for device in range(p):
        openings.append([])
        connect(placement, SimpleNamespace(rank=lambda: device), "meta")  # noqa: B023 - called at once
    rounds = 0
    while any(openings):
        heads = Counter(own[0] for own in openings if own)
        ready = {opening for opening, ends in heads.items() if ends == 2}
        assert ready, f"every device waits for another one: {heads}"
        openings = [own[1:] if own and own[0] in ready else own for own in openings]
        rounds += 1
    assert rounds == (6 if name == "ring" and p % 2 else 4)


def test_a_send_that_waits_keeps_no_other_edge_from_letting_go(monkeypatch):
    """An early activation that the next rank is slow to receive, and gradients that the one before has received."""
    left, waited = {2: False, 0: True}, []
    group = SimpleNamespace(
        send=lambda tensors, peer, tag: SimpleNamespace(
            is_completed=lambda: left[peer], wait=lambda: waited.append(peer)
        )
    )
    monkeypatch.setattr(transport.dist, "get_group_rank", lambda group, rank: rank)
    message = MessageFormat((1,), torch.float32, torch.device("cpu"))
    channels = {(1, 2): group, (1, 0): group}
    messages = Transport(Pipeline(None, Placement.linear(3), 1, range(3), channels), message)
    messages.post_send(Action(Kind.SEND_F, 1, 0), torch.zeros(1))
    messages.post_send(Action(Kind.SEND_I, 1, 0), torch.zeros(1))
    assert [*messages._sends] == [Action(Kind.SEND_F, 1, 0)] and waited == [0]


class Backend:
    """A process group that records its stream for the tensors of its messages, and a host that sees no event done.

    The allocator has that stream only for memory that it frees itself. Such memory is late when it is freed.
    """

    def __init__(self) -> None:
        self.recorded: list[StorageWeakRef] = []
        self.messages = 0

    def post(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        self.messages += 1
        self.recorded += [StorageWeakRef(t.untyped_storage()) for t in tensors if is_of_allocator(t)]
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: False)

    send = recv = post

    @property
    def late(self) -> int:
        return sum(block.expired() for block in self.recorded)


class Blank:
    """A stage whose results are new memory, and any actions of features, which do nothing."""

    def forward(self, microbatch, input, will_recompute=False):
        return torch.empty(2)

    def recompute(self, microbatch, input):
        return torch.empty(2)

    def release_output(self, output):
        pass

    def backward(self, microbatch, input, output, output_gradient):
        return torch.empty(2)

    def reduce_gradients(self):
        pass

    def extend(self, executor):
        return {
            kind: lambda instruction: None
            for kind in {instruction.action.kind for instruction in executor.instructions} - executor.handlers.keys()
        }


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_memory_of_messages_comes_back_late(monkeypatch, name, p):
    monkeypatch.setattr(transport.dist, "get_group_rank", lambda group, rank: rank)
    program = lower(build_schedule(name, num_devices=p, num_microbatches=2 * p))
    message, blank = MessageFormat((2,), torch.float32, torch.device("cpu")), Blank()

    def run(device: int) -> Backend:
        backend = Backend()
        channels = {edge: backend for edge in edges(program.placement) if device in edge}
        pipeline = Pipeline(None, program.placement, device, range(p), channels)
        stages = dict.fromkeys(program.placement.stages[device], blank)
        messages = Transport(pipeline, message)
        executor = Executor(program, device, stages, messages, [blank])
        held = []
        for position in range(len(program.actions[device])):
            executor.run(until=position + 1)
            held.append(len(messages._sends))
        assert held == sent_bytes(program, device, lambda action: 1)
        executor.run()
        assert not messages._sends and not pipeline.unfinished
        assert backend.messages == sum(action.kind in MESSAGES for action in program.actions[device]) > 0
        return backend

    assert not any(run(device).late for device in range(p))
    monkeypatch.setattr(transport, "unrecorded", lambda tensor: tensor)
    for device in range(p):
        backend = run(device)
        assert backend.late == backend.messages  # all come back late


def test_a_host_asks_what_has_left_where_no_answer_shows_it():
    """An evaluation sends outputs and receives nothing back."""
    schedule = build_schedule("1f1b", num_devices=4, num_microbatches=6)
    evaluation = lower(schedule.forward_only())
    for device in range(4):
        instructions = rank_program(evaluation, device).instructions
        assert not any(instruction.frees_sent for instruction in instructions)
    more = (build_schedule("interleaved", num_devices=4, num_microbatches=8), with_vocabulary(schedule, 1))
    assert all(map(polls_departures, (evaluation, *map(lower, more))))
    assert not polls_departures(lower(schedule))


def test_a_tensor_of_another_shape_than_its_receiver_expects_is_not_sent():
    device = torch.device("cpu")
    same, step = (
        MessageFormat((2, 3), torch.float32, device),
        MessageFormat(None, torch.float32, device, [(2, 3), (4, 3)]),
    )
    send = Action(Kind.SEND_F, 1, 1)
    for message, words in ((same, "variable_seq_lengths=True"), (step, "--pipemem-message-shapes message")):
        assert message.shape_of(0) == (2, 3)
        messages = Transport(Pipeline(None, Placement.linear(3), 1, range(3), {}), message)
        messages._channel_of[send[:2]] = SimpleNamespace(group=None, peer=None)
        with refused("message-shape", "(3, 3)", 3, words, kind=UnsupportedError):
            messages.post_send(send, torch.zeros(3, 3))
    assert step.typical == (4, 3) and same.typical == (2, 3)
