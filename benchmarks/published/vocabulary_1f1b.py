"""Predict a step of the code of arXiv 2411.05288: 1F1B with the vocabulary cut over all devices.

Its order (``vocab_parallel_schedule.py``, commit 6191c3bf) leaves every collective the time of a whole pass. A device
computes T of a microbatch and S of the next one together, either directly after a backward or directly after a forward.
The choice depends on the device's distance from the last one in time. So all devices compute S at about the same time:

    device 2 of 4, one barrier:   ... B0 T3 S4 | exchange | [reduce S4] F4 | exchange | [broadcast X5 G4] B1 T4 S5 ...

Brackets hold collectives, which devices post and later wait for. All devices run them in one order. Unlike this package's
runtime, the code exchanges activations and gradients with its neighbours between passes, while the device is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_pipemem.schedule.action import Kind

_Collective = tuple[Kind, int]
"""A collective of a microbatch. BCAST_X also broadcasts G of the microbatch before, and REDUCE_X also sums statistics."""


class _Pass(NamedTuple):
    kind: Kind


class _Exchange(NamedTuple):
    """Messages of this device that start together, as (source, destination). The device waits for all of them."""

    messages: tuple[tuple[int, int], ...]


class _Post(NamedTuple):
    collective: _Collective


class _Wait(NamedTuple):
    collective: _Collective


_Instruction = _Pass | _Exchange | _Post | _Wait


class _Places(NamedTuple):
    """Where the devices compute T and S. The first and last value of a sequence belong to the first and last device."""

    after_backward: Sequence[bool]  # whether directly after B, instead of after F
    offsets: Sequence[float]  # seconds by which a device's interval starts later than the last device's
    warm_up: Sequence[int]  # number of such steps before the first backward


def _places(num_devices: int, forward: float, backward: float) -> _Places:
    offset, rows = 0.0, [(True, 0.0)]
    while len(rows) < num_devices:
        if offset - forward >= -backward:
            offset -= forward
            rows.append((True, offset))
        else:
            rows.append((False, offset))
            offset += backward - forward
            rows.append((True, offset))
    after_backward, offsets = zip(*reversed(rows[:num_devices]), strict=True)
    warm_up = [0]
    for device in range(num_devices - 2, -1, -1):
        is_same = after_backward[device] and not after_backward[device + 1]
        warm_up.insert(0, warm_up[0] + (not is_same))
    return _Places(after_backward, offsets, warm_up)


class _Device:
    """Lists the instructions of one device."""

    def __init__(self, device: int, num_microbatches: int, barriers: int, seconds: tuple[float, float], p: int) -> None:
        self._device, self._p, self._m, self._extra = device, p, num_microbatches, barriers - 1
        self._forward, self._backward = seconds
        self._places = _places(p, *seconds)
        self._is_last = device == p - 1
        self._list: list[_Instruction] = []
        self._count = {kind: 0 for kind in (Kind.F, Kind.B, Kind.S, Kind.LOSS, Kind.EMBED_F, Kind.EMBED_B)}
        self._reduced: _Collective | None = None  # the newest reduction, which T, LOSS and the last device's B wait for
        self._is_embedding_opened = self._is_reduction_due = self._is_embedding_due = False

    def instructions(self) -> list[_Instruction]:
        p, m, extra, device = self._p, self._m, self._extra, self._device
        after_backward, offsets, warm_up = self._places
        ahead = p - device  # microbatches before the first S
        for _ in range(device + 1):
            self._embed(posts=True)
        for position in range(ahead):
            self._exchange(receives=-1)
            self._embed(posts=True)
            self._compute_forward()
            if position < ahead - 1:
                self._exchange(sends=1)
        for further in range(extra + 1):
            if further and self._is_last:
                self._loss()
            self._open()
            self._score()
            self._reduce()
            if further < extra:
                self._embed(posts=True)
            self._exchange(sends=1)
            self._exchange(receives=-1)
            self._compute_forward()
        for step in range(warm_up[device]):
            self._open()
            self._score()
            is_early = device == p - 2 or not after_backward[device + 1]
            if is_early:
                self._reduce()
            if step == warm_up[device] - 1:
                self._exchange(sends=1, receives=1)
            self._reduce()
        opens_first = after_backward[device] or offsets[device] - self._forward > -self._backward
        for microbatch in range(m):
            has_forward, is_end = self._count[Kind.F] < m, microbatch == m - 1
            if opens_first:
                self._open()
            self._compute_backward()
            if after_backward[device]:
                self._score()
            if not self._is_last:
                self._exchange(sends=-1, receives=-1 if has_forward else 0)
            if after_backward[device] and offsets[device] + self._forward >= 0:
                self._reduce()
            if self._is_last:
                self._exchange(sends=-1, receives=-1 if has_forward else 0)
            if not opens_first:
                self._open()
            if has_forward:
                self._compute_forward()
            if not after_backward[device]:
                self._score()
            if device == p - 2:
                self._reduce()
            if has_forward or not is_end:
                self._exchange(sends=1 if has_forward else 0, receives=1)
            self._reduce()
        while self._count[Kind.EMBED_B] < m:
            self._open_embedding()
            self._compute_embedding_gradient()
        if not extra:
            self._list += [_Post((Kind.BCAST_X, m)), _Wait((Kind.BCAST_X, m))]
            self._await_reduction()
            self._list.append(_Pass(Kind.T))
        return self._list

    def _next(self, kind: Kind) -> int:
        self._count[kind] += 1
        return self._count[kind] - 1

    def _exchange(self, sends: int = 0, receives: int = 0) -> None:
        """Exchange with neighbours. 1 is the next device, -1 the one before, 0 none. The first takes in embeddings."""
        device, inside = self._device, range(self._p)
        if receives < 0 and not device:
            self._list.append(_Wait((Kind.REDUCE_E, self._count[Kind.F])))
        messages = [(device, device + sends)] * (sends != 0) + [(device + receives, device)] * (receives != 0)
        messages = [message for message in messages if all(end in inside for end in message)]
        if messages:
            self._list.append(_Exchange(tuple(messages)))

    def _embed(self, posts: bool = False) -> None:
        self._list.append(_Pass(Kind.EMBED_F))
        self._next(Kind.EMBED_F)
        if posts:
            self._list.append(_Post((Kind.REDUCE_E, self._count[Kind.EMBED_F] - 1)))

    def _compute_forward(self) -> None:
        microbatch = self._next(Kind.F)
        self._list.append(_Pass(Kind.F))
        if self._is_last and not microbatch:
            self._list.append(_Post((Kind.BCAST_X, 0)))

    def _loss(self) -> None:
        microbatch = self._next(Kind.LOSS)
        self._await_reduction()
        if self._extra or microbatch < self._m - 1:
            self._list.append(_Post((Kind.BCAST_X, microbatch + 1)))

    def _compute_backward(self) -> None:
        microbatch = self._next(Kind.B)
        if self._is_last and (not self._extra or microbatch < self._m - 1):
            self._loss()
        if self._is_last:
            self._await_reduction()
        self._list.append(_Pass(Kind.B))

    def _await_reduction(self) -> None:
        if self._reduced is not None:
            self._list.append(_Wait(self._reduced))

    def _open(self) -> None:
        """Post the collectives that the next T, S and embedding gradient wait for."""
        following = self._count[Kind.S]
        if following >= self._places.warm_up[0] + 2 + self._extra:
            self._open_embedding()
        if following < self._m + self._extra and not self._is_last:
            self._list.append(_Post((Kind.BCAST_X, following)))

    def _open_embedding(self) -> None:
        self._list.append(_Post((Kind.BCAST_E, self._count[Kind.EMBED_B])))
        self._is_embedding_opened = True

    def _compute_embedding_gradient(self) -> None:
        if self._is_embedding_opened:
            self._list += [_Wait((Kind.BCAST_E, self._next(Kind.EMBED_B))), _Pass(Kind.EMBED_B)]
            self._is_embedding_opened = False

    def _score(self) -> None:
        """Compute T of a microbatch, S of the next one, and the passes of the embedding that are due."""
        if self._count[Kind.S] < self._m + self._extra:
            microbatch = self._next(Kind.S)
            if not self._is_last:
                self._list.append(_Wait((Kind.BCAST_X, microbatch)))
            if microbatch:
                self._await_reduction()
                self._list.append(_Pass(Kind.T))
            if microbatch < self._m:
                self._list.append(_Pass(Kind.S))
            is_late = microbatch >= self._places.warm_up[0] + self._extra
            self._is_reduction_due = True
            if is_late and self._count[Kind.EMBED_F] < self._m:
                self._embed()
                self._is_embedding_due = True
        self._compute_embedding_gradient()

    def _reduce(self) -> None:
        if self._is_reduction_due:
            if self._is_embedding_due:
                self._list.append(_Post((Kind.REDUCE_E, self._count[Kind.EMBED_F] - 1)))
            self._reduced = (Kind.REDUCE_X, self._count[Kind.S] - 1)
            self._list.append(_Post(self._reduced))
        self._is_reduction_due = self._is_embedding_due = False


def step_seconds(
    seconds: Mapping[Kind, Sequence[float]],
    collectives: Mapping[Kind, float],
    message: Callable[[int, int], float],
    num_microbatches: int,
    barriers: int,
) -> float:
    """Return the seconds of a step of at least two microbatches more than devices.

    Args:
        seconds: of F, B, S, T, EMBED_F and EMBED_B, one value per device.
        collectives: seconds of BCAST_X, with G; of REDUCE_X, with the statistics; of REDUCE_E and of BCAST_E.
        message: seconds of a message, given its source and destination.
        num_microbatches: microbatches of the step.
        barriers: 1 for Algorithm 2 of the paper, 2 for its Algorithm 1.
    """
    p = len(seconds[Kind.F])
    typical = seconds[Kind.F][0], seconds[Kind.B][0]
    programs = [_Device(device, num_microbatches, barriers, typical, p).instructions() for device in range(p)]
    return _Play(programs, seconds, collectives, message).seconds()


class _Play:
    """Runs the instructions of all devices as early as possible."""

    def __init__(
        self,
        programs: Sequence[Sequence[_Instruction]],
        seconds: Mapping[Kind, Sequence[float]],
        collectives: Mapping[Kind, float],
        message: Callable[[int, int], float],
    ) -> None:
        self._programs, self._pass_seconds, self._collective_seconds = programs, seconds, collectives
        self._message = message
        self._now = [0.0] * len(programs)
        self._posts: dict[_Collective, list[float]] = defaultdict(list)
        self._order = [step.collective for step in programs[0] if isinstance(step, _Post)]
        self._channel_free, self._ends = 0.0, dict[_Collective, float]()
        # Per message from one device to another, the times at which both ends are ready for it, oldest first.
        self._sends: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._receives: dict[tuple[int, int], list[float]] = defaultdict(list)

    def seconds(self) -> float:
        running = {device: self._run(device) for device in range(len(self._programs))}
        while running:
            before = self._progress(), len(running)
            for device in list(running):
                if next(running[device], None) is None:
                    del running[device]
            self._run_collectives()
            assert (self._progress(), len(running)) != before, "the devices wait for one another"
        return max(self._now)

    def _run(self, device: int) -> Iterator[bool]:
        """Run a device's instructions. Yield whenever it waits for another device."""
        for step in self._programs[device]:
            match step:
                case _Pass(kind):
                    self._now[device] += self._pass_seconds[kind][device]
                case _Post(collective):
                    self._posts[collective].append(self._now[device])
                case _Wait(collective):
                    while collective not in self._ends:
                        yield True
                    self._now[device] = max(self._now[device], self._ends[collective])
                case _Exchange(messages):
                    numbers = [self._offer(device, message) for message in messages]
                    pairs = list(zip(messages, numbers, strict=True))
                    while any(min(len(self._sends[m]), len(self._receives[m])) <= number for m, number in pairs):
                        yield True
                    for ends, number in pairs:
                        both = max(self._sends[ends][number], self._receives[ends][number])
                        self._now[device] = max(self._now[device], both + self._message(*ends))

    def _progress(self) -> int:
        """Return a number that grows with every post, exchange and finished collective."""
        times = (*self._posts.values(), *self._sends.values(), *self._receives.values())
        return len(self._ends) + sum(map(len, times))

    def _offer(self, device: int, ends: tuple[int, int]) -> int:
        """Record that a device is ready for its next message between two devices, and return the message's number."""
        times = (self._sends if ends[0] == device else self._receives)[ends]
        times.append(self._now[device])
        return len(times) - 1

    def _run_collectives(self) -> None:
        """Run the collectives that all devices have posted, in the first device's order."""
        for collective in self._order[len(self._ends) :]:
            if len(self._posts[collective]) < len(self._programs):
                return
            start = max(self._channel_free, *self._posts[collective])
            self._channel_free = self._ends[collective] = start + self._collective_seconds[collective[0]]
