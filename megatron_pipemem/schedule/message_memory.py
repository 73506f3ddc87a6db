"""The device memory of messages: when a sent message may be freed, and the buffers of NCCL.

A device keeps a sent message until the receiver has used it. The host cannot ask the backend, because it runs ahead of
the device. So an answer shows it: each message of the receiver was sent after some messages to it had been used. When
the answer arrives, their memory is free in the order of the device's work.

    device 0   F0 F1 F2 F3   | I0 arrives: device 1 has used F0, F1 and F2 before it sent I0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from megatron_pipemem.schedule.action import SENDS, Action
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Program

MESSAGE_CTAS = 4
"""Thread blocks that NCCL may use for one group of messages. A posted receive occupies multiprocessors while it waits. NCCL's
default is up to 32 thread blocks, which would slow the computation."""

_NCCL_BYTES_PER_CTA = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
"""Bytes of NCCL's buffers for one thread block of a connection, with its protocols LL, LL128 and Simple at their default
sizes (NCCL 2.29). They follow from its sources, and no GPU has measured them. Each run on GPUs does, with
``--pipemem-report``: ``nccl_bytes`` is the difference of ``torch.cuda.mem_get_info`` before and after the channels open."""


def nccl_bytes(placement: Placement, device: int) -> int:
    """Return the bytes of NCCL's own buffers for the messages of one device, which PyTorch's allocator does not count.

    The receiving end of an edge has them.
    """
    return sum(edge[1] == device for edge in Router(placement).edges) * MESSAGE_CTAS * _NCCL_BYTES_PER_CTA


def freed_sends(program: Program, device: int) -> dict[Action, tuple[Action, ...]]:
    """Return the sends of this device whose memory is free when an action of it has its message, by that action.

    Each send is listed once. Actions that free nothing are left out.
    """
    router, answers = Router(program.placement), _answers(program, device)
    freed: dict[Action, tuple[Action, ...]] = {}
    num_freed: Counter[int] = Counter()  # of this device's messages to each peer
    for action in program.actions[device]:
        if (answer := answers.get(router.awaited(action))) is not None:
            # Earlier messages on the same edge have arrived, too, and count here.
            if sends := tuple(answer.used[num_freed[answer.peer] : answer.num_used]):
                freed[action] = sends
            num_freed[answer.peer] = max(num_freed[answer.peer], answer.num_used)
    return freed


class _Answer(NamedTuple):
    peer: int
    used: list[Action]  # this device's messages that the peer uses, in order
    num_used: int  # how many of them it has used before it sends


def _answers(program: Program, device: int) -> dict[Action | None, _Answer]:
    """Return the answer to this device's messages that each of its receives brings."""
    router = Router(program.placement)
    answers: dict[Action | None, _Answer] = {}
    sent = {message.receive: message.send for message in map(router.emitted, program.actions[device]) if message}
    for peer in {source for source, destination in router.edges if destination == device}:
        actions = program.actions[peer]
        messages = {message.send: message for message in map(router.emitted, actions) if message}
        used: list[Action] = []
        for action in actions:
            receive = router.awaited(action)
            if receive is not None and receive in sent:
                used.append(sent[receive])
            elif action in messages and messages[action].edge[1] == device:
                answers[messages[action].receive] = _Answer(peer, used, len(used))
    return answers


def sent_bytes(program: Program, device: int, bytes_of: Callable[[Action], int]) -> list[int]:
    """Return the bytes of sent messages that no answer has freed, after each action of a device.

    This is the most that they can take. A transport that asks its backend may free some earlier. ``bytes_of`` returns
    the bytes of a send's message.
    """
    freed = freed_sends(program, device)
    changes = (
        bytes_of(action) if action.kind in SENDS else -sum(map(bytes_of, freed.get(action, ())))
        for action in program.actions[device]
    )
    return list(accumulate(changes))
