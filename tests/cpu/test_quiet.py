"""The log of a run on CPU ranks: ours can be told apart, and nothing is said of GPUs that are not there."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
import warnings
from unittest import mock

import pytest
from lanes import nightly
from launching import REPOSITORY, free_port, start_command
from refusals import refused

from megatron_pipemem.flags import words
from megatron_pipemem.tools.cpu import ignore_missing_packages
from megatron_pipemem.tools.cpu.flags import CPU_FLAGS, cpu_flags
from megatron_pipemem.tools.cpu.ranks import start_ranks

PROGRAM = """
from megatron_pipemem.tools.cpu import activate
activate(verbose={verbose})
import logging
import megatron.core.models.gpt.gpt_layer_specs
logging.getLogger("megatron.core.tensor_parallel.random").warning("CPU RNG state changed within GPU RNG context")
"""


@nightly("the next test, and the run below: this shows only that Megatron has something to say")
@pytest.mark.parametrize("verbose", [False, True])
def test_megatron_says_nothing_of_missing_packages_unless_asked(environment: dict[str, str], verbose: bool) -> None:
    command = [sys.executable, "-W", "default", "-c", PROGRAM.format(verbose=verbose)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ("Apex is not installed" in done.stderr) == verbose
    assert ("CPU RNG state" in done.stderr) == verbose


def test_only_warnings_of_missing_packages_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    with mock.patch.object(logger, "filters", []), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ignore_missing_packages()
        for said in ("Apex is not installed", "another cause"):
            warnings.warn_explicit(said, UserWarning, "x.py", 1, module="megatron.core.x")
        logger.warning("CPU RNG state changed within GPU RNG context")
        logger.warning("another message")
    assert [str(warning.message) for warning in caught] == ["another cause"]
    assert caplog.messages == ["another message"]


LOGGED = """
import logging
from megatron_pipemem.logs import show_log
logging.basicConfig(level=logging.INFO)
for _ in range(2):
    show_log()
logger = logging.getLogger("megatron_pipemem.mcore.somewhere")
logger.info("a plan of %d", 3)
logger.warning("a failure")
logging.getLogger("megatron.core").info("theirs")
"""


@pytest.mark.parametrize(
    ("rank", "lines"),
    [
        ("0", ["pipemem: a plan of 3", "pipemem: warning: a failure"]),
        ("2", ["pipemem: rank 2: warning: a failure"]),
    ],
)
def test_our_lines_have_one_short_prefix_and_warnings_come_from_every_rank(
    environment: dict[str, str], rank: str, lines: list[str]
) -> None:
    command = [sys.executable, "-c", LOGGED]
    done = subprocess.run(command, env=environment | {"RANK": rank}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == lines
    assert done.stderr.splitlines() == ["INFO:megatron.core:theirs"], "the log of others is theirs"


def test_flags_of_a_gpu_are_replaced_on_cpu_ranks_and_others_kept() -> None:
    everything = words(CPU_FLAGS)
    assert cpu_flags(["--micro-batch-size", "1"]) == everything
    assert cpu_flags(["--micro-batch-size", "1", *everything]) == []
    added = cpu_flags(["--micro-batch-size=1", "--num-workers", "2", "--no-rope-fusion"])
    assert "--num-workers" not in added and "--no-rope-fusion" not in added and len(added) == len(everything) - 3
    asked = cpu_flags(["--micro-batch-size", "1", "--transformer-impl", "transformer_engine"])
    assert asked[-2:] == ["--transformer-impl", "local"], "the last one counts"
    assert cpu_flags(["--steps", "3"]) == [], "of another program"


def test_a_run_over_several_ranks_needs_a_launcher(monkeypatch) -> None:
    flags = ["--micro-batch-size", "1", "--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size=2"]
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with refused("no-launcher", "--nproc-per-node 8"):
        cpu_flags(flags)
    cpu_flags(["--micro-batch-size", "1"])
    monkeypatch.setenv("RANK", "0")
    cpu_flags(flags)


LLAMA = shlex.split("""
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 88 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope --rotary-base 500000
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 3e-2 --bf16
    --transformer-impl transformer_engine --attention-backend auto --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --cross-entropy-loss-fusion --pipeline-model-parallel-size 2
    --tokenizer-type NullTokenizer --vocab-size 257 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --distributed-timeout-minutes 5
""")


def test_a_script_for_gpus_learns_text_at_once_and_its_log_can_be_read(environment, script, tmp_path) -> None:
    """One rank is a new process, whose imports are in its log. The other one is forked."""
    report, text, data = tmp_path / "report.json", tmp_path / "text", tmp_path / "data" / "letters"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text("abcd" * 200)
    script(REPOSITORY / "scripts" / "text_to_dataset.py", text, data)
    read = ("--train-data-path", f"{data}_train", "--valid-data-path", f"{data}_valid")
    read += ("--data-cache-path", str(tmp_path / "cache"))
    ours = ("--pipemem-schedule", "v-half", "--pipemem-report", str(report), "--pipemem-trace", str(tmp_path / "trace"))
    words = ("run", "--cpu", str(REPOSITORY / "scripts" / "pretrain_gpt.py"), *LLAMA, *read, *ours)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    log = tmp_path / "log"
    (last,) = start_ranks(start_command, [(job | {"RANK": "1", "LOCAL_RANK": "1"}, *words)], [log])
    with log.open("a") as shared:
        first = environment | job | {"RANK": "0", "LOCAL_RANK": "0"}
        command = [sys.executable, "-m", "megatron_pipemem", *words]
        done = subprocess.run(command, env=first, stdout=shared, stderr=subprocess.STDOUT, check=False)
    last.join()
    printed = log.read_text()
    assert (done.returncode, last.exitcode) == (0, 0), printed
    lines = printed.splitlines()
    losses = json.loads(report.read_text())["losses"]
    assert len(losses) == 10 and losses[-1] < 3.0 < 5.0 < losses[0], "a uniform guess has ln 257 = 5.5"
    for noise in ("Apex is not", "CPU RNG state", "INFO:megatron_pipemem", "adam_beta1 ..", "is not installed."):
        assert noise not in printed
    assert len(lines) < 250
    numbers = [number for number, line in enumerate(lines) if line.startswith("pipemem: ")]
    said = "\n".join(lines[number] for number in numbers)
    for words_of in (
        "added --distributed-backend gloo",
        "--no-rope-fusion",
        "enabled: schedule v-half",
        "wrote the last step",
    ):
        assert said.count(words_of) == 1
    last_step = max(number for number, line in enumerate(lines) if re.search(r"iteration +10/", line))
    end = [number for number in numbers if number > last_step]
    assert len(end) > 3 and end == list(range(end[0], end[0] + len(end)))
