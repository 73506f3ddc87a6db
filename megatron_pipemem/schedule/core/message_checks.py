"""Proof that a program runs what its schedule says, and that its messages match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import MESSAGES, ORDERED, RECEIVES, Action
from megatron_pipemem.schedule.core.messages import Edge, Message
from megatron_pipemem.schedule.core.schedule import Program

Places = dict[Action, tuple[int, int]]
"""Device and position of every action."""


def check_compute_actions(program: Program) -> None:
    """Check that a program without its messages and gradient reductions is the orders of its schedule."""
    orders = program.schedule.orders
    if len(program.actions) != len(orders):
        raise ScheduleError(
            f"the program has actions for {len(program.actions)} devices but its schedule has {len(orders)}; "
            "lower the schedule again"
        )
    for device, (order, actions) in enumerate(zip(orders, program.actions, strict=True)):
        computed = [(position, action) for position, action in enumerate(actions) if action.kind in ORDERED]
        for wanted, found in zip_longest(order, computed):
            position, action = found or (len(actions), wanted)
            if action != wanted or found is None:
                raise ScheduleError(
                    f"the schedule has {wanted or 'nothing more'} here and the program "
                    f"{found[1] if found else 'nothing more'}; lower the schedule again",
                    device=device,
                    position=position,
                    action=action,
                )


def check_posts(places: Places, messages: Mapping[Action, Message], receives: Mapping[Action, Action]) -> None:
    """Check that every message is sent after its producer and received before its consumer, on their devices, and that
    none is idle.

    Args:
        places: where every action stands.
        messages: message of every producer.
        receives: receive of every consumer.
    """
    for producer, message in messages.items():
        _check_post(message.send, producer, places, after=True)
    for consumer, receive in receives.items():
        _check_post(receive, consumer, places, after=False)
    known = {message.send for message in messages.values()} | set(receives.values())
    for action, (device, position) in places.items():
        if action.kind in MESSAGES and action not in known:
            use = "needs it" if action.kind in RECEIVES else "produces it for another device"
            raise ScheduleError(f"no action here {use}; remove it", device=device, position=position, action=action)


def _check_post(post: Action, compute: Action, places: Places, *, after: bool) -> None:
    device, position = places[compute]
    side = "after" if after else "before"
    purpose = "its result does not reach the next device" if after else "its input does not reach this device"
    if post not in places:
        raise ScheduleError(
            f"{purpose} without {post}; add {post} {side} it", device=device, position=position, action=compute
        )
    post_device, post_position = places[post]
    if post_device != device:
        problem = f"belongs to {compute}, which device {device} runs at position {position}; move it there"
    elif (post_position > position) is not after:
        problem = f"must come {side} {compute} at position {position}; move it"
    else:
        return
    raise ScheduleError(problem, device=post_device, position=post_position, action=post)


def check_edges(places: Places, messages: Iterable[Message]) -> None:
    """Check that both ends of every directed edge post the same messages in the same order."""
    edges: dict[Edge, list[Message]] = {}
    for message in messages:
        edges.setdefault(message.edge, []).append(message)
    for (source, destination), crossing in edges.items():
        sent = sorted((places[message.send][1], message) for message in crossing)
        received = sorted((places[message.receive][1], message) for message in crossing)
        for (position, message), (other_position, other) in zip(sent, received, strict=True):
            if message != other:
                raise ScheduleError(
                    f"device {source} sends {message.send} at position {position} when device {destination} receives "
                    f"{other.receive} at position {other_position}; messages from device {source} to device "
                    f"{destination} arrive in sending order, so receive {message.receive} first",
                    device=destination,
                    position=other_position,
                    action=other.receive,
                )
