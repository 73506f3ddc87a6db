"""Placements: the device of every stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_pipemem.errors import ScheduleError, UnsupportedError


@dataclass(frozen=True)
class Placement:
    """The device of every stage of the model.

    A bidirectional pipeline holds the model more than once. Its stages are numbered replica by replica: with ``S``
    stages in one replica, stages ``r * S`` to ``(r + 1) * S - 1`` are replica ``r``. Every microbatch runs through
    one replica.

    Args:
        name: ``linear``, ``interleaved``, ``v``, ``wave``, ``bidirectional``, or ``custom``.
        devices: ``devices[stage]`` is the device that holds the stage.
        replicas: number of replicas of the model.
    """

    name: str
    devices: tuple[int, ...]
    replicas: int = 1

    def __repr__(self) -> str:
        replicas = "" if self.replicas == 1 else f", {self.replicas} replicas"
        if len(self.devices) > 16:
            return f"<Placement {self.name}: {self.num_stages} stages on {self.num_devices} devices{replicas}>"
        return f"<Placement {self.name}: {', '.join(map(str, self.devices))}{replicas}>"

    def __post_init__(self) -> None:
        used = set(self.devices)
        if not used or used != set(range(len(used))):
            raise ScheduleError(
                "bad-placement",
                f"devices must be numbered from 0 without a gap, each with a stage; this placement has {sorted(used)}",
            )
        if self.replicas < 1 or len(self.devices) % self.replicas:
            raise ScheduleError(
                "bad-placement",
                f"{len(self.devices)} stages cannot be divided into {self.replicas} replicas of a model; give every "
                "replica the same number of stages",
            )

    @property
    def num_stages(self) -> int:
        """The number of stages of all replicas together."""
        return len(self.devices)

    @cached_property
    def model_stages(self) -> int:
        """The number of stages of one replica."""
        return len(self.devices) // self.replicas

    @cached_property
    def num_devices(self) -> int:
        return max(self.devices) + 1

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every device in model order. The index of a stage in ``stages[device]`` is its chunk."""
        stages_of: list[list[int]] = [[] for _ in range(self.num_devices)]
        for stage, device in enumerate(self.devices):
            stages_of[device].append(stage)
        return tuple(tuple(stages) for stages in stages_of)

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on one device."""
        return max(len(stages) for stages in self.stages)

    @cached_property
    def is_round_robin(self) -> bool:
        """Return whether there is one replica and stage ``s`` is on device ``s % p``, as in stock Megatron."""
        return self.replicas == 1 and all(
            device == stage % self.num_devices for stage, device in enumerate(self.devices)
        )

    def chunk_of(self, stage: int) -> int:
        """Return the chunk of a stage: its index among the stages of its device."""
        return self.stages[self.devices[stage]].index(stage)

    def next_stage(self, stage: int) -> int | None:
        """Return the stage that consumes this stage's output; ``None`` for the stage that computes the loss."""
        return stage + 1 if (stage + 1) % self.model_stages else None

    def previous_stage(self, stage: int) -> int | None:
        """Return the stage whose output this stage consumes; ``None`` for the stage that reads the data."""
        return stage - 1 if stage % self.model_stages else None

    def replica_of(self, stage: int) -> int:
        """Return the replica of the model that ``stage`` belongs to."""
        return stage // self.model_stages

    def counterparts(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of the same stage in all replicas, the given one included."""
        return tuple(range(stage % self.model_stages, self.num_stages, self.model_stages))

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the devices that hold a replica of a stage, in ascending order."""
        return tuple(sorted({self.devices[replica] for replica in self.counterparts(stage)}))

    @classmethod
    def linear(cls, num_devices: int) -> Placement:
        """Place one stage on every device, in order."""
        return cls("linear", tuple(range(_positive(num_devices))))

    @classmethod
    def interleaved(cls, num_devices: int, num_chunks: int) -> Placement:
        """Place stages round robin: stage ``chunk * p + device`` (Megatron's virtual pipeline)."""
        p, v = _positive(num_devices), _positive(num_chunks, "chunks")
        return cls("linear" if v == 1 else "interleaved", tuple(s % p for s in range(p * v)))

    @classmethod
    def v_shape(cls, num_devices: int) -> Placement:
        """Place stages ``d`` and ``2p - 1 - d`` on device ``d``: device 0 holds the first and the last stage."""
        return cls.wave(num_devices, 2)

    @classmethod
    def wave(cls, num_devices: int, num_chunks: int) -> Placement:
        """Place stages on devices 0 to ``p - 1``, then back from ``p - 1`` to 0, and so on. Two chunks make a V."""
        p, v = _positive(num_devices), _positive(num_chunks, "chunks")
        devices = tuple(s % p if (s // p) % 2 == 0 else p - 1 - s % p for s in range(p * v))
        return cls({1: "linear", 2: "v"}.get(v, "wave"), devices)

    @classmethod
    def bidirectional(cls, num_devices: int) -> Placement:
        """Place two replicas with ``p`` stages each: one on devices 0 to ``p - 1``, the other on ``p - 1`` to 0."""
        p = _positive(num_devices)
        return cls("bidirectional", (*range(p), *reversed(range(p))), replicas=2)

    @classmethod
    def from_devices(cls, devices: tuple[int, ...], replicas: int = 1) -> Placement:
        """Return the placement with these devices. Its name is ``custom`` unless it is one of the known placements."""
        p = max(devices) + 1
        if replicas > 1:
            named = cls.bidirectional(p)
            return named if (named.devices, named.replicas) == (devices, replicas) else cls("custom", devices, replicas)
        if len(devices) % p == 0:
            for named in (cls.interleaved(p, len(devices) // p), cls.wave(p, len(devices) // p)):
                if named.devices == devices:
                    return named
        return cls("custom", devices)


def _positive(count: int, counted: str = "devices") -> int:
    if count < 1:
        raise UnsupportedError("bad-number", f"a schedule needs at least 1 of {counted}, not {count}")
    return count
