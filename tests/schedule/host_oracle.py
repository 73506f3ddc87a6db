"""Plays lowered programs with a thread for every host and every stream, apart from the package's own rule.

A host launches the actions of its device one after another and runs ahead. A device has one stream for computing, one for
every directed edge, one for collectives and one for every set of devices that sums over replicas. A post waits for the
computing before it; a message moves, and a collective or a sum ends, when all that take part have come to it. Threads are
generators that yield the event they wait for, so that a world where nothing moves any more is seen without a clock.

``unsafe`` lets one host at a time wait for its whole device before one of its actions, while all other hosts go on.
``left_by_waiting`` lets all hosts wait for their devices, or for their computing alone, before and after actions of some kinds.
``left_between_steps`` lets all hosts wait for their devices, and then for one another, between two steps.

``stuck`` plays devices that have one hardware queue each, as ``CUDA_DEVICE_MAX_CONNECTIONS=1`` makes them: an action leaves
the queue when it may start, and none behind it starts before. ``hangs`` plays devices that serve all their posts in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Generator, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.schedule import Program


class Event:
    def __init__(self) -> None:
        self.is_set, self.waiting = False, []


Thread = Generator[Event, None, None]


class World:
    """All hosts and streams. ``gates[device][position]`` lets the host launch that action.

    With ``in_order``, a device serves its posts in one stream, whatever they are. Hosts wait for their whole devices before
    and after actions of the kinds in ``waits``, or with ``of_stream`` for the computing that they have launched. At the
    positions ``meets``, one a device, they wait for their devices and then for all other hosts.
    """

    def __init__(
        self,
        program: Program,
        in_order: bool = False,
        waits: Collection[Kind] = (),
        of_stream: bool = False,
        meets: Sequence[int] = (),
    ) -> None:
        self.program, self.in_order, self.waits, self.meets = program, in_order, waits, meets
        self.lists = program.actions
        self.gates = [[Event() for _ in actions] for actions in self.lists]
        self.launched: list[list[Event]] = [[] for _ in self.lists]
        self.computed: list[list[Event]] = [[] for _ in self.lists]
        self.awaited_by_hosts = self.computed if of_stream else self.launched
        self.ended = [0] * len(self.lists)  # how many of these a host knows to have ended
        self.hosts = len(self.lists), Event()
        self.over: dict[Hashable, Event] = {}  # whatever several devices do together
        self.come: Counter[Hashable] = Counter()
        self.work: dict[Hashable, tuple[deque[Thread], Event]] = {}
        self.ready: deque[Thread] = deque()
        size = program.placement.model_stages
        # Of the replicas of a stage on one device, the last to be posted.
        self.last = {
            (device, a.stage % size): a.stage
            for device, actions in enumerate(self.lists)
            for a in actions
            if a.kind.value == "REDUCE_REPLICAS"
        }
        self.received = {tuple(a) for actions in self.lists for a in actions if a.kind.value.startswith("RECV")}

    def set(self, event: Event) -> None:
        event.is_set = True
        self.ready += event.waiting
        event.waiting.clear()

    def open(self, devices: Iterable[int]) -> None:
        """Let the hosts of these devices launch all their actions."""
        for device in devices:
            for gate in self.gates[device]:
                gate.is_set = True

    def run(self, threads: Iterable[Thread]) -> None:
        """Run these and all other threads until none can go on."""
        self.ready += threads
        while self.ready:
            thread = self.ready.popleft()
            for event in thread:
                if not event.is_set:
                    event.waiting.append(thread)
                    break

    def left(self) -> list[str]:
        """The actions that have not ended."""
        ended = [[done.is_set for done in launched] for launched in self.launched]
        return [
            f"{action} on device {device}"
            for device, actions in enumerate(self.lists)
            for action, has_ended in zip_longest(actions, ended[device])
            if not has_ended
        ]

    def host(self, device: int) -> Thread:
        for position, action in enumerate(self.lists[device]):
            yield self.gates[device][position]
            if self.meets and position == self.meets[device]:
                yield from self.launched[device]
                yield from self.meet_hosts()
            if action.kind in self.waits:
                yield from self.wait(device)
            done, here = Event(), Event()
            self.launched[device].append(done)
            partner = self.meeting(device, action)
            self.computed[device].append(here if partner else done)
            self.put((device, "compute"), self.compute(self.awaited(action), here if partner else done))
            if partner:
                key, members, lane = partner
                lane = "posts" if self.in_order else lane
                self.put((device, lane), self.meet(key, members, here, done))
            if action.kind in self.waits:
                yield from self.wait(device)

    def wait(self, device: int) -> Thread:
        events = self.awaited_by_hosts[device]
        while self.ended[device] < len(events):
            yield events[self.ended[device]]
            self.ended[device] += 1

    def meet_hosts(self) -> Thread:
        missing, met = self.hosts
        self.hosts = missing - 1, met
        if missing == 1:
            self.set(met)
        yield met

    def queue(self, device: int, strict: bool) -> Thread:
        """Start the actions of a device one after another; if strict, each when the one before it has ended."""
        under_way: dict[Hashable, Event] = {}
        for position, action in enumerate(self.lists[device]):
            yield self.gates[device][position]
            done, here = Event(), Event()
            self.launched[device].append(done)
            partner = self.meeting(device, action)
            yield from self.compute(self.awaited(action), here if partner else done)
            if partner:
                key, members, lane = partner
                if lane in under_way:
                    yield under_way[lane]
                under_way[lane] = done
                self.ready.append(self.meet(key, members, here, done))
                if strict:
                    yield done

    def put(self, lane: Hashable, job: Thread) -> None:
        if lane not in self.work:
            self.work[lane] = deque(), Event()
            self.ready.append(self.stream(lane))
        jobs, some = self.work[lane]
        jobs.append(job)
        self.set(some)

    def stream(self, lane: Hashable) -> Thread:
        jobs, some = self.work[lane]
        while True:
            while jobs:
                yield from jobs.popleft()
            some.is_set = False
            yield some

    def compute(self, keys: list[Hashable], done: Event) -> Thread:
        for key in keys:
            yield self.over.setdefault(key, Event())
        self.set(done)

    def meet(self, key: Hashable, members: int, here: Event, done: Event) -> Thread:
        yield here
        over = self.over.setdefault(key, Event())
        self.come[key] += 1
        if self.come[key] == members:
            self.set(over)
        yield over
        self.set(done)

    def meeting(self, device: int, action) -> tuple[Hashable, int, Hashable] | None:
        """What devices do together, how many they are, and in which stream."""
        kind, stage, microbatch = action
        name, devices = kind.value, self.program.placement.devices
        if name in ("SEND_F", "RECV_F", "SEND_I", "RECV_I"):
            up = name in ("SEND_F", "RECV_I")
            other = devices[stage + 1 if up else stage - 1]
            there = stage + {"SEND_F": 1, "SEND_I": -1}.get(name, 0)
            return (name[-1], there, microbatch), 2, (device, other) if name[0] == "S" else (other, device)
        if name == "REDUCE_REPLICAS":
            stage %= self.program.placement.model_stages
            if self.last[device, stage] != action.stage:
                return None
            holders = self.program.placement.holders(stage)
            return ("SUM", stage, microbatch), len(holders), ("sums", holders)
        if name.startswith(("REDUCE_E", "REDUCE_X", "BCAST", "STATS")):
            return (name, microbatch), len(self.lists), "collectives"
        return None

    def awaited(self, action) -> list[Hashable]:
        """What computing waits for that comes from other devices."""
        kind, stage, microbatch = action
        name, schedule = kind.value, self.program.schedule
        keys: list[Hashable] = []
        for letters, receive in (("F", "RECV_F"), ("IB", "RECV_I")):
            if name in letters and (receive, stage, microbatch) in self.received:
                keys.append((receive[-1], stage, microbatch))
        if name == "REDUCE_GRAD" and self.program.placement.replicas > 1:
            keys.append(("SUM", stage % self.program.placement.model_stages, microbatch))
        if schedule.vocabulary_barriers:
            last = schedule.num_stages - 1
            before = {"S": "BCAST_X", "T": "BCAST_G", "EMBED_B": "BCAST_E"}
            if name in before:
                keys.append((before[name], microbatch))
            if name == "F" and stage == 0:
                keys.append(("REDUCE_E", microbatch))
            if name in "IB" and stage == last:
                keys.append(("REDUCE_X", microbatch))
            if name == "LOSS":
                first = microbatch - microbatch % schedule.units.parts
                keys += [("STATS", earlier) for earlier in range(first, microbatch + 1)]
            if name == "REDUCE_X" and schedule.vocabulary_barriers == 1:
                keys.append(("STATS", microbatch))
        return keys


def unsafe(program: Program, one_queue: bool = False) -> set[tuple[int, int]]:
    """``(device, position)`` of all actions before which a host that waits for its device waits without end.

    With ``one_queue``, devices have one hardware queue each.
    """
    problems = set()
    for device in range(len(program.actions)):
        world = World(program)
        world.open(other for other in range(len(program.actions)) if other != device)
        launch = partial(world.queue, strict=False) if one_queue else world.host
        world.run(map(launch, range(len(program.actions))))
        for position, gate in enumerate(world.gates[device]):
            if [done.is_set for done in world.launched[device]] != [True] * position:
                problems.add((device, position))
            world.set(gate)
            world.run(())
        assert not world.left(), "the program does not end"
    return problems


def left_by_waiting(program: Program, kinds: Collection[Kind], of_stream: bool = False) -> list[str]:
    """The actions that never end if every host waits for its whole device before and after its actions of these kinds.

    With ``of_stream``, hosts wait for the computing alone, as one does that reads a number from its device.
    """
    return _left(World(program, waits=kinds, of_stream=of_stream))


def left_between_steps(program: Program) -> list[str]:
    """The actions that never end of two steps, between which hosts wait for their devices and then for one another."""
    units = len(program.schedule.units)
    rows = tuple(
        (*actions, *(a._replace(microbatch=(a.microbatch or 0) + units) for a in actions))
        for actions in program.actions
    )
    return _left(World(replace(program, actions=rows), meets=[*map(len, program.actions)]))


def _left(world: World) -> list[str]:
    devices = range(len(world.lists))
    world.open(devices)
    world.run(map(world.host, devices))
    return world.left()


def stuck(program: Program, strict: bool = False) -> list[str]:
    """The actions that never end on devices with one hardware queue each.

    ``strict`` asks for more than any hardware does: nothing leaves the queue before it has ended, and messages have ended when
    both ends are at the heads of their queues.
    """
    world = World(program)
    world.open(range(len(program.actions)))
    world.run(world.queue(device, strict) for device in range(len(program.actions)))
    return world.left()


def hangs(program: Program, in_order: bool = True) -> list[str]:
    """The actions that never end, if ``in_order`` on devices that serve all their posts strictly one after the other."""
    return _left(World(program, in_order))
