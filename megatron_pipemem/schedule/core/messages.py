"""Say which message carries the result of every compute action, and which receive an action waits for."""

from __future__ import annotations

from typing import NamedTuple

from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.placement import Placement

Edge = tuple[int, int]


class Message(NamedTuple):
    """One tensor on its way between two devices, with the action that posts it at either end."""

    edge: Edge
    send: Action
    receive: Action


class Router:
    """Say which message a compute action emits and which one it waits for, under one placement."""

    def __init__(self, placement: Placement):
        devices = placement.devices
        self._emits: dict[tuple[Kind, int], tuple[Edge, Kind, int, Kind, int]] = {}
        self._awaits: dict[tuple[Kind, int], Kind] = {}
        for stage, device in enumerate(devices):
            after = placement.next_stage(stage)
            if after is None or devices[after] == device:
                continue
            activations = ((device, devices[after]), Kind.SEND_F, stage, Kind.RECV_F, after)
            gradients = ((devices[after], device), Kind.SEND_I, after, Kind.RECV_I, stage)
            self._emits |= {
                (Kind.F, stage): activations,
                (Kind.I, after): gradients,
                (Kind.B, after): gradients,
            }
            self._awaits |= {
                (Kind.F, after): Kind.RECV_F,
                (Kind.I, stage): Kind.RECV_I,
                (Kind.B, stage): Kind.RECV_I,
            }

    @property
    def edges(self) -> set[Edge]:
        """All directed edges that messages use."""
        return {edge for edge, *_ in self._emits.values()}

    def emitted(self, action: Action) -> Message | None:
        """Return the message that carries the result of a compute action; ``None`` when the result stays on the device."""
        kind, stage, microbatch = action
        route = self._emits.get((kind, stage))
        if route is None:
            return None
        edge, send, source, receive, destination = route
        return Message(edge, Action(send, source, microbatch), Action(receive, destination, microbatch))

    def awaited(self, action: Action) -> Action | None:
        """Return the receive that a compute action needs; ``None`` when its input is on the device already."""
        kind, stage, microbatch = action
        receive = self._awaits.get((kind, stage))
        return None if receive is None else Action(receive, stage, microbatch)
