"""Keep several versions of a rank's weights, and let each action see the version that it must use.

A version is one flat buffer per element type. Parameters are views of the version in use, so changing the version
copies nothing. The optimizer updates the newest version in place. If later actions still need its old values, they are
first copied to a free buffer, and the optimizer updates the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction
from megatron_pipemem.schedule.action import Action

_ALIGNMENT = 128  # bytes, so that every parameter begins where kernels like it

Buffers = dict[torch.dtype, torch.Tensor]


class WeightVersions:
    """The versions of the weights of a rank's model chunks, by number.

    The first version is 0, and each update makes the next number. ``renumber`` shifts all numbers. The parameters
    become views of the buffers of version 0, with the same values.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self._parameters = list(dict.fromkeys(parameters))
        self._sizes: dict[torch.dtype, int] = {}
        self._offsets: list[int] = []
        for parameter in self._parameters:
            offset = self._sizes.get(parameter.dtype, 0)
            step = _ALIGNMENT // parameter.element_size()
            self._offsets.append(offset)
            self._sizes[parameter.dtype] = offset + -(-parameter.numel() // step) * step
        self._counters = [parameter._version for parameter in self._parameters]
        self._free: list[Buffers] = []
        self.newest = 0
        self.most_held = 1
        """The highest number of versions that existed at the same time."""
        self._held = {0: self._allocate()}
        self._shown_version: int | None = None
        for parameter, view in zip(self._parameters, self._views(0), strict=True):
            view.copy_(parameter.detach())
        self.show(0)

    @property
    def sizes(self) -> Mapping[torch.dtype, int]:
        """Elements in a buffer of a version, by element type. Alignment is included."""
        return self._sizes

    @property
    def version_bytes(self) -> int:
        """Bytes of one version, alignment of the parameters included."""
        return sum(size * dtype.itemsize for dtype, size in self._sizes.items())

    @property
    def bytes(self) -> int:
        """Bytes of the buffers of all versions and of the free buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers())

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for buffers in (*self._held.values(), *self._free) for buffer in buffers.values()]

    def reserve(self, versions: int) -> None:
        """Allocate free buffers until ``versions`` versions have buffers, the existing ones included."""
        while len(self._held) + len(self._free) < versions:
            self._free.append(self._allocate())

    def show(self, version: int) -> None:
        """Make the parameters views of the buffers of this version."""
        if version == self._shown_version:
            return
        for parameter, view in zip(self._parameters, self._views(version), strict=True):
            parameter.data = view
        self._shown_version = version

    def advance(self, needed: Collection[int]) -> None:
        """Make a new version with the values of the newest, and show it, so that the optimizer can update it.

        ``needed`` has the versions that later actions still use. All others end, and their buffers are reused. If the
        newest is not among ``needed``, its buffer becomes that of the new version, without a copy.
        """
        for version in [v for v in self._held if v != self.newest and v not in needed]:
            self._free.append(self._held.pop(version))
        following = self.newest + 1
        if self.newest in needed:
            self._copy_to(following, self._held[self.newest])
        else:
            self._held[following] = self._held.pop(self.newest)
        self.newest = following
        self.most_held = max(self.most_held, len(self._held))
        self._shown_version = None
        self.show(following)

    def renumber(self, by: int) -> None:
        """Add ``by`` to the numbers of all versions."""
        self._held = {version + by: buffers for version, buffers in self._held.items()}
        self.newest += by
        self._shown_version = None if self._shown_version is None else self._shown_version + by

    def keep_only_newest(self) -> None:
        """Drop all versions but the newest, keep their buffers for later versions, and show the newest."""
        self.show(self.newest)
        self._free += map(self._held.pop, self.older())

    def forget_updates(self) -> None:
        """Reset the counters in which autograd notes that parameters were changed in place.

        Autograd refuses a backward if a parameter that its graph saved has changed since. Here such a backward is
        right: the change went to another buffer, and the parameter shows the version of the forward again.
        """
        torch._C._autograd._unsafe_set_version_counter(tuple(self._parameters), tuple(self._counters))

    def older(self) -> dict[int, Buffers]:
        """Return the buffers of all versions but the newest."""
        return {version: buffers for version, buffers in self._held.items() if version != self.newest}

    def restore(self, older: Mapping[int, Mapping[torch.dtype, torch.Tensor]]) -> None:
        """Replace all versions but the newest by copies of ``older``, the result of an earlier ``older()``."""
        self.keep_only_newest()
        for version, saved in older.items():
            self._copy_to(version, saved)

    def _copy_to(self, version: int, source: Mapping[torch.dtype, torch.Tensor]) -> None:
        """Make ``version`` a copy of the buffers ``source``."""
        self._held[version] = self._free.pop() if self._free else self._allocate()
        for dtype, buffer in self._held[version].items():
            buffer.copy_(source[dtype])

    def _allocate(self) -> Buffers:
        device = self._parameters[0].device if self._parameters else None
        return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in self._sizes.items()}

    def _views(self, version: int) -> list[torch.Tensor]:
        buffers = self._held[version]
        return [
            buffers[parameter.dtype][offset : offset + parameter.numel()].view(parameter.shape)
            for parameter, offset in zip(self._parameters, self._offsets, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class WeightSwitch:
    """The step feature that shows each action its version of the weights, and updates the weights after some.

    ``versions`` has the version of every forward and backward, and ``updates`` the actions after which ``update`` makes
    the next version, with the versions that later actions still need. If the training loop steps the optimizer after
    the training step, the new version has the old values until then. ``catch_up`` takes a postponed optimizer step,
    when an action needs a version that does not exist yet.
    """

    weights: WeightVersions
    versions: Mapping[Action, int]
    updates: Mapping[Action, Collection[int]]
    update: Callable[[Collection[int]], None]
    catch_up: Callable[[], None] | None = None

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers that show each action its weights first, and update them after the actions of ``updates``."""
        others = dict(executor.handlers)

        def switched(instruction: Instruction) -> None:
            action = instruction.action
            if action in self.versions:
                version = self.versions[action]
                if self.catch_up is not None and version > self.weights.newest:
                    self.catch_up()
                self.weights.show(version)
            others[action.kind](instruction)
            if action in self.updates:
                self.update(self.updates[action])

        return dict.fromkeys((action.kind for action in (*self.versions, *self.updates)), switched)
