"""What the tests of the CPU lane launch."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from commands import run_as_rank

from megatron_pipemem import ranks
from megatron_pipemem.run import run
from megatron_pipemem.tools.cpu.ranks import end_ranks, start_ranks

REPOSITORY = Path(__file__).resolve().parents[2]

TOY_MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3 --eval-interval 1000 --eval-iters 0
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --tokenizer-type NullTokenizer
    --distributed-timeout-minutes 5 --pipeline-model-parallel-size 2
""")


def tell(number: int) -> None:
    """Print what a rank finds, as one line of JSON."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    variables = {name: os.environ[name] for name in names}
    variables |= {"number": number, "imported": "megatron.training" in sys.modules, "devices": 0}
    if (torch := sys.modules.get("torch")) is not None:
        variables["devices"] = torch.cuda.device_count()
    print(json.dumps(variables), flush=True)


def sleep_beside_a_child() -> None:
    """Print the number of a process that this one has started, and sleep."""
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)


def run_guarded(environment: Mapping[str, str], script: Path, *arguments: str) -> None:
    """Run a script as ``pipemem run`` does, in this process, which ends with it."""
    os.environ.update(environment)
    run(False, script, [*arguments])


def run_plain(script: Path, *arguments: str) -> None:
    """Run a script as ``python script arguments`` does, in this process, which ends with it."""
    sys.argv = [str(script), *arguments]
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    os._exit(code)


def run_program(script: Path, *arguments: str) -> None:
    """Run a script with its folder's modules, in this process, which ends with it."""
    sys.path.insert(0, str(script.parent))
    run_plain(script, *arguments)


def start_command(environment: Mapping[str, str], *words: str) -> None:
    """Run ``pipemem`` with these words and environment variables in the process of a rank."""
    os.environ.update(environment)
    run_as_rank(*words)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(*arguments: str) -> None:
    """Start ranks as ``pipemem launch`` does, from this process, which ends with them."""
    sys.argv = ["ranks", "--standalone", *arguments]
    ranks.main()


def run_ranks(
    count: int, script: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[list[int | None], list[str]]:
    """Run a script on guarded ranks without a launcher. Return exit codes, and the output of each rank."""
    logs = [script.with_name(f"rank-{rank}.log") for rank in range(count)]
    processes = start_ranks(run_guarded, [(environment or {}, script, *arguments)] * count, logs)
    try:
        for process in processes:
            process.join()
    finally:
        end_ranks(processes)
    return [process.exitcode for process in processes], [log.read_text() for log in logs]
