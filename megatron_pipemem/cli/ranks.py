"""Run torchrun so that its last words are the first cause of a failure.

``python -m megatron_pipemem.cli.ranks`` takes torchrun's own flags.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

_ENDED_BY_LAUNCHER = -15  # SIGTERM: so torchrun ends the others


def main() -> None:
    """Start this node's ranks and wait for them.

    Raises:
        SystemExit: with code 1 when a rank failed, or the ranks could not be started.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(None))
    except ChildFailedError as error:
        _end(first_cause(error.failures))
    except SignalException as error:
        _end(f"ended by {error.sigval.name}, and the ranks with it")
    except (RuntimeError, OSError, ValueError) as error:  # of the rendezvous, or of torchrun's own flags
        why = str(error).strip().splitlines() or [type(error).__name__]
        _end(f"the ranks could not be started: {why[0]}; is the port free, and the address that of the first node?")


def first_cause(failures: Mapping[int, Any]) -> str:
    """Say which rank failed first, at what, and what to do.

    Args:
        failures: torchrun's ``ProcessFailure`` by global rank.
    """
    # A rank that was killed says nothing, and those that miss it do.
    killed = {
        rank: each for rank, each in failures.items() if each.exitcode < 0 and each.exitcode != _ENDED_BY_LAUNCHER
    }
    rank, failure = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    message = failure.message
    if isinstance(message, dict):  # what our rank guard wrote: the traceback, and its last words
        return str(message.get("extraInfo", {}).get("py_callstack") or message.get("message"))
    if rank in killed:
        return (
            f"rank {rank} failed: killed by {failure.signal_name()}\n"
            "what to do: look for the reason in its node's log (dmesg shows what ran out of memory)"
        )
    return (
        f"rank {rank} failed: exit code {failure.exitcode}\n"
        "what to do: see what it wrote above; with several nodes, the log of another one may name the first cause"
    )


def _end(words: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(words, style="bold red", markup=False)
    sys.exit(1)


if __name__ == "__main__":
    main()
