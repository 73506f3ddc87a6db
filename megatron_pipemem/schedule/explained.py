"""Explain with ``validate`` why a schedule that was never validated fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.validator import validate


def explained_by_validation[F: Callable[..., Any]](function: F) -> F:
    """Make a function of a schedule raise the error of ``validate`` if an invalid schedule breaks it.

    A valid schedule pays nothing: validation runs only after a lookup has failed.

    Args:
        function: takes the schedule first.
    """

    @wraps(function)
    def explained(schedule: Schedule, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(schedule, *args, **kwargs)
        except LookupError:
            validate(schedule)
            raise

    return cast(F, explained)
