"""Process groups over gloo wherever NCCL is asked for, which take no more of a rank's processor and memory than they need."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import Work, distributed_c10d

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
)
_RELEASE_SECONDS = 1.0


def _on_one_device(create: Callable[..., None]) -> Callable[..., None]:
    """The constructor of gloo's groups, which now share the device of the process's first one.

    A device has a thread that wakes up a hundred times per second, and PyTorch gives every group a device of its own. Megatron
    makes dozens of groups: with 60 of them, four idle ranks keep a quarter of a core busy.
    """
    devices: list = []

    @functools.wraps(create)
    def wrapper(group: Any, *args: Any, **kwargs: Any) -> None:
        if not devices or kwargs.keys() != {"timeout"}:  # PyTorch itself makes all groups with that keyword
            create(group, *args, **kwargs)
            if not devices:
                devices.extend(group.options._devices)
            return
        options = group._Options()
        options._devices, options._timeout = devices, kwargs["timeout"]
        create(group, *args, options)

    return wrapper


def _over_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """``create`` with gloo for NCCL, without the keyword arguments that gloo does not know."""

    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
        if "backend" in known:
            known["backend"] = _gloo(known["backend"])
        return create(*map(_gloo, args), **known)

    return wrapper


def _gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend


def _releasing(collective: Callable[..., Any]) -> Callable[..., Any]:
    """``collective`` whose tensors are its caller's alone again when it has been waited for.

    The thread that carries out a collective of gloo drops its tensors some time after it has told that it is done: it needs
    the interpreter's lock for that. Until then memory is held that the program has let go, and counts of it differ from run to
    run. Here that thread gets tensors of its own, with the same storage, which can be waited for. They are not dropped here
    before that thread has dropped them: PyTorch then hands the Python object over to it without a lock, which corrupts memory.
    """

    @functools.wraps(collective)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if distributed_c10d._world.pg_coalesce_state:  # it only begins when others have been added to it
            return collective(*args, **kwargs)
        lent: list[torch.Tensor] = []
        work = collective(*_lend(args, lent), **dict(zip(kwargs, _lend(tuple(kwargs.values()), lent), strict=True)))
        if isinstance(work, Work):
            return _ReleasingWork(work, lent)
        _await_release(lent)
        return work

    return wrapper


def _lend(values: Sequence[Any], lent: list[torch.Tensor]) -> list[Any]:
    """Return the values, every dense tensor among them and in lists of theirs as another one that is noted in ``lent``."""
    found = []
    for value in values:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
            value = value.detach()
            lent.append(value)
        elif type(value) in (list, tuple):
            value = _lend(value, lent)
        found.append(value)
    return found


def _await_release(lent: list[torch.Tensor]) -> None:
    """Wait until these tensors have no other references, or for a second: a caller may want to keep one."""
    patience = time.monotonic() + _RELEASE_SECONDS
    while lent:
        # In Python there are the list's reference and that of the call, in C++ the one of Python.
        is_ours = sys.getrefcount(lent[-1]) == 2 and _held_by_python_alone(lent[-1])
        if is_ours:
            del lent[-1]
        elif time.monotonic() > patience:
            _keep(lent)
        else:
            time.sleep(0)


_late: list[torch.Tensor] = []
"""Tensors that gloo's threads may still hold, although the collective has been waited for."""


def _keep(lent: list[torch.Tensor]) -> None:
    """Empty the list, and keep its tensors until gloo has dropped them."""
    _late[:] = [each for each in (*_late, *lent) if not _held_by_python_alone(each)]
    lent.clear()


def _held_by_python_alone(tensor: torch.Tensor) -> bool:
    return tensor._use_count() == 1  # type: ignore[attr-defined]


class _ReleasingWork(Work):
    """A collective that is under way. When it has been waited for, it holds neither its tensors nor its result."""

    def __init__(self, work: Work, lent: list[torch.Tensor]):
        super().__init__()
        self._work: Work | None = work
        self._lent = lent

    def __del__(self) -> None:
        _keep(self._lent)  # of a collective that is not waited for

    def wait(self, *timeout: timedelta) -> bool:
        if self._work is not None:
            self._work.wait(*timeout)
            self._work = None
            _await_release(self._lent)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return self._work is None or self._work.is_success()

    def exception(self) -> Any:
        return None if self._work is None else self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return super().result() if self._work is None else self._shared().result()

    def get_future(self) -> torch.futures.Future:
        return super().get_future() if self._work is None else self._shared().get_future()

    def _shared(self) -> Any:
        """Return the work. Callers may keep its tensors from now on, so ``wait`` does not wait for their release."""
        _keep(self._lent)
        return self._work


def install() -> None:
    """Wrap what makes groups, and collectives, in both places that export them; share gloo's device."""
    gloo: Any = distributed_c10d.ProcessGroupGloo
    gloo.__init__ = _on_one_device(gloo.__init__)
    makers = ("init_process_group", "new_group")
    collectives = [name for name in _COLLECTIVES if hasattr(distributed_c10d, name)]  # not every version has all
    for names, wrap in ((makers, _over_gloo), (collectives, _releasing)):
        for name in names:
            wrapped = wrap(getattr(distributed_c10d, name))
            for module in (distributed_c10d, torch.distributed):
                setattr(module, name, wrapped)
