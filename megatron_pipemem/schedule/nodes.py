"""The numbers of actions: every action of a schedule or program is a node, device by device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import lt

from megatron_pipemem.schedule.action import Action, Kind


def numbered(orders: Sequence[Sequence[Action]]) -> list[range]:
    """Number all actions device by device, from 0, and return the numbers of every device as a range."""
    lanes, first = [], 0
    for order in orders:
        lanes.append(range(first, first + len(order)))
        first += len(order)
    return lanes


class ActionNodes:
    """The nodes of orders, or of the rows of a program.

    Attributes:
        lanes: the nodes of every device.
        actions: the action of every node.
        groups: by kind and stage, the node of every unit, in the order of the device. Actions without a unit have the
            unit 0. Of an action that occurs twice, the groups have the last node.
    """

    def __init__(self, orders: Sequence[Sequence[Action]]) -> None:
        self.lanes = numbered(orders)
        self.actions: list[Action] = list(chain.from_iterable(orders))
        self.groups: dict[tuple[Kind, int], dict[int, int]] = defaultdict(dict)
        for node, (kind, stage, unit) in enumerate(self.actions):
            self.groups[kind, stage][unit or 0] = node

    def of(self, *kinds: Kind, stage: int) -> Mapping[int, int]:
        """Return the nodes of these kinds on a stage, by unit."""
        groups = [self.groups[kind, stage] for kind in kinds if (kind, stage) in self.groups]
        if len(groups) == 1:
            return groups[0]
        return {unit: node for group in groups for unit, node in group.items()}


def come_before(earlier: Mapping[int, int], nodes: Mapping[int, int]) -> bool:
    """Return whether the first argument has a smaller node for every unit of the second."""
    return earlier.keys() >= nodes.keys() and all(map(lt, map(earlier.__getitem__, nodes), nodes.values()))
