"""Refusals of commands: one line with a code and the values at fault, with and without --json. Nothing is written.

A row has the command, the code of the error with the values that its line names, and the exit code if it is not 2.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest
from refusals import check_refusal

from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.size import estimated, is_fitted
from megatron_pipemem.tools.cli.app import load_commands

ROOT = Path(__file__).parents[2]
NAMES = {
    "ROOT": str(ROOT),
    "TINY": str(ROOT / "configs" / "runs" / "tiny-cpu.yaml"),
    "TE": "-s transformer_impl=transformer_engine",
}

TABLE = r"""
# Names, sizes and options of schedules
simulate v-hlaf -p 4 -m 8 | unknown-schedule "'v-half'"
simulate atuo -p 4 -m 8 | unknown-schedule "'auto'"
simulate 1F1B -p 4 -m 8 | unknown-schedule "'1f1b'"
simulate 1f1b -p -3 -m 8 | bad-number --devices -3
simulate 1f1b -p 4 | missing-option --microbatches
simulate 1f1b -m 4 | missing-option --devices
simulate 1f1b -p 4 -m 8 --chunks 2 | needs-chunks 1 2
simulate 1f1b -p 4 -m 8 -o colour=red | unknown-option colour
simulate interleaved -p 4 -m 8 -o chunks | bad-syntax chunks
simulate interleaved -p 4 -m 8 -o =3 | bad-syntax =3
simulate interleaved -p 4 -m 8 -o chunks=two | bad-number interleaved chunks two
simulate interleaved -p 4 -m 8 -v 2 -o chunks=3 | given-twice chunks
simulate interleaved -p 4 -m 8 -o chunks=2 -o chunks=3 | given-twice chunks
simulate zb-auto -p 8 -m 24 -o memory_cap=1.5 | has-own-flag memory_cap zb-auto
simulate auto -p 4 -m 8 -o placement=x | bad-choice placement "'x'" interleaved
simulate auto -p 4 -m 8 -o colour=1 | unknown-option "'auto'" "'colour'" placement
simulate auto -p 4 -m 8 -o placement=linear --chunks 2 | needs-chunks linear 1 2
simulate auto -p 4 -m 8 -o placement=v --chunks 1 | needs-chunks v 2 1
simulate auto -p 4 -m 8 -o period=true --offload half | conflicting-features period offload
simulate zb-h1 v-half -p 4 -m 8 --single-queue | conflicting-options --single-queue
simulate stock -p 4 -m 8 --single-queue | not-for-stock --single-queue
simulate stock -p 4 -m 6 -v 2 | needs-microbatches 6
show stock -p 4 -m 6 -v 2 | needs-microbatches 6
simulate stock -p 4 -m 2 -v 2 | needs-microbatches 2
simulate zb-h1 v-half -p 4 -m 8 --chunks 3 | needs-chunks
simulate 1f1b -p 2 -m 2 --schedule-module gone.py | cannot-import gone.py
show gems -p 2 -m 4 --steps 2 | no-steps gems replicas --steps
schedules v-hlaf | unknown-schedule "'v-half'"

# Prices and memory
simulate 1f1b -p 4 -m 8 --costs 1,1 | bad-syntax --costs 1,1
simulate 1f1b -p 4 -m 8 --costs a,b,c | bad-syntax --costs a,b,c
simulate 1f1b -p 4 -m 8 --costs 1,-1,1 | bad-number --costs 1,-1,1
simulate 1f1b -p 4 -m 8 --costs 0,0,0 | bad-number --costs 0,0,0
simulate 1f1b -p 4 -m 8 --costs 1,nan,1 | bad-number --costs 1,nan,1
simulate 1f1b -p 4 -m 8 --costs 1,inf,1 | bad-number --costs 1,inf,1
simulate 1f1b -p 4 -m 8 --costs 1e308,1,1 | bad-number forward 1e+308 1e+30
simulate 1f1b -p 4 -m 8 --costs missing.json | no-file costs missing.json
simulate 1f1b -p 4 -m 8 --p2p -1 | bad-number --p2p -1.0
simulate 1f1b -p 4 -m 8 --p2p nan | bad-number --p2p nan
simulate 1f1b -p 4 -m 8 --p2p 1e308 | bad-number p2p 1e+308
simulate 1f1b -p 4 -m 8 --layers 3 | too-few-layers --layers 3 4
simulate v-half -p 4 -m 8 --layers 7 | too-few-layers --layers 7 8
simulate 1f1b -p 4 -m 8 --head-cost 1e308 | bad-number --head-cost 1e308 1e+30
simulate 1f1b -p 4 -m 8 --head-cost much | bad-number --head-cost much
simulate 1f1b -p 4 -m 8 --head-cost 2layers | needs-option --layers --head-cost 2layers
simulate 1f1b -p 4 -m 8 --vocab-cut auto | needs-option --head-cost --vocab-cut auto
simulate chimera -p 2 -m 2 --vocab-cut 1 | unsupported-placement head embedding 2
simulate 1f1b -p 4 -m 8 --memory-cap 0 | bad-number "memory cap" 0
simulate 1f1b -p 4 -m 8 --memory-cap 1e308 | bad-number "memory cap" 1e308
simulate auto -p 4 -m 8 --memory-cap 6gb | bad-number "memory cap" 6gb 6GiB
simulate auto -p 4 -m 12 --memory-cap 2GiB | unit-mismatch --memory-cap 2GiB
simulate auto -p 4 -m 8 --costs bytes.json --memory-cap 10B | cap-unreachable 10B 1000B
simulate 1f1b -p 4 -m 8 --costs bytes.json --memory-cap 2500B | over-cap 2500 | 1
simulate 1f1b -p 8 -m 16 --memory-cap 0.4 | over-cap auto zb-auto 0.375 po-h po-f 0.1875
simulate v-half -p 4 -m 8 --memory-cap 1,0.7,1,1 | over-cap v-half 0.75 "device 1"
simulate v-half -p 4 -m 8 --memory-cap 1,1,1 | wrong-count 3 4
simulate 1f1b -p 2 -m 4 --offload most | bad-choice offload "'most'"
simulate 1f1b -p 2 -m 4 --offload full --memory-cap 0.01 | cap-unreachable "memory cap of 0.01"
simulate 1f1b -p 2 -m 4 --offload full --host-memory 1GiB | unit-mismatch
simulate 1f1b -p 2 -m 4 --offload full --offload-ratio -1 | bad-number --offload-ratio -1.0
simulate 1f1b -p 4 -m 8 --offload-ratio 1 | needs-option --offload-ratio 1 --offload
simulate auto -p 4 -m 8 --offload-ratio 1 | needs-option --offload-ratio 1 --offload
show 1f1b -p 4 -m 8 --offload-ratio 1 | needs-option --offload-ratio 1 --offload
simulate 1f1b -p 4 -m 8 --host-memory 1 | needs-option --host-memory 1 --offload
simulate 1f1b -p 4 -m 8 -o recompute=no | bad-choice recompute no
simulate 1f1b -p 4 -m 8 -o recompute=selective --memory-cap 0.3 | cap-unreachable 1f1b selective 0.3
simulate 1f1b -p 2 -m 4 --attention-share 0.3 | needs-option --attention-share 0.3
show 1f1b -p 2 -m 4 --attention-share 0.3 | needs-option --attention-share 0.3
simulate seq1f1b -p 2 -m 4 --slice-cut flops | needs-option --attention-share --slice-cut flops
simulate seq1f1b -p 2 -m 4 --slice-cut time | bad-choice --slice-cut time
simulate seq1f1b -p 2 -m 4 --attention-share 0.3 --vocab-cut auto --head-cost 1 | conflicting-options --vocab-cut
pareto -p 2 -m 4 --seconds -1 | bad-number --seconds -1
pareto -p 2 -m 4 --seconds nan | bad-number --seconds nan
pareto -p 4 -m 4 --layers 3 | too-few-layers --layers 3

# Schedule files
simulate missing.csv | no-file schedule missing.csv
simulate mine.csv -p 3 | other-size mine.csv 3
simulate mine.csv -m 9 | other-size mine.csv 9
simulate mine.csv -v 2 | other-size mine.csv 2
simulate mine.csv -o group_size=3 | options-of-file mine.csv group_size
check none.csv | no-file none.csv "No such file"
check ROOT | cannot-read ROOT
check binary.csv | cannot-read binary.csv UTF-8 "byte 0"
check gems --write gems.csv -p 2 -m 4 --to torch | not-in-dialect gems replicas=2 devices=0-1-1-0
check v-hal --write out.csv -p 2 -m 2 | unknown-schedule "'v-half'"
check wrong.csv --write out.csv | wrong-order "action 0B0" | 1

# Files that cannot be written
check mine.csv --write out.xml | bad-choice out.xml .csv .txt
show 1f1b -p 2 -m 2 --output picture.pdf | bad-choice "'picture.pdf'" .png .svg .html .json
show 1f1b -p 2 -m 2 --output picture | bad-choice "'picture'" .png .svg .html .json
pareto -p 8 -m 64 --output x.html | bad-choice x.html .png .svg
report ROOT --output x.html | bad-choice x.html .png .svg
plan TINY --output x.csv | bad-choice x.csv .yaml
plan TINY --output /mistyped/out.yaml | cannot-write /mistyped
plan TINY --output folder.yaml | cannot-write folder.yaml
plan TINY --output /proc/x.yaml | cannot-write
plan TINY --output mine.csv/x.yaml | cannot-write
profile --model tiny-gpt --formulas --output folder.yaml | cannot-write folder.yaml
profile --model tiny-gpt --formulas --output /proc/x.json | cannot-write
grid ROOT/configs/grids/tiny-cpu.yaml --output mine.csv | cannot-write
grid ROOT/configs/runs/tiny-cpu.yaml --print | wrong-file tiny-cpu.yaml launch
check 1f1b -p 4 -m 8 --write mine.csv/x.csv | cannot-write mine.csv/x.csv
show 1f1b -p 4 -m 8 --output /proc/x.png | cannot-write
pareto -p 2 -m 4 --output /proc/x.png | cannot-write

# Plans, profiles, reports and layouts
plan TINY --memory 60gb | bad-number --memory 60gb
plan TINY --search-seconds inf | bad-number --search-seconds inf
plan nope.sh | no-file nope.sh
plan nope.yaml | no-file nope.yaml
plan ROOT/scripts/setup.sh | no-file setup.sh
plan ROOT/configs | no-file ROOT/configs
profile TINY --formulas --tp 2 | conflicting-options --tp
trace nope.json | no-file nope.json
report nope.json | no-file nope.json
explore --pyodide . | needs-option --pyodide --export
layout llama3-8b | missing-option --devices
layout llama3-8b -p 1 | no-pipeline
layout llama3-8b -p 4 -v 2 -m 3 | needs-microbatches "the 3" "such as 4"
layout llama3-8b -p 4 -v 2 -m 6 | needs-microbatches 6 "groups of 4" "such as 8"
layout TINY -p 1 | no-pipeline
layout TINY --tp 2 | conflicting-options --tp
layout lama3-8b -p 4 | no-file "'lama3-8b'" "'llama3-8b'"
layout llama3-8b -p 4 --beside Et|tL | bad-layout "'Et|tL'" 32
layout llama3-8b -p 4 --vocab-cut 3 | bad-type pipemem_vocab_cut "'3'"
layout llama3-8b -p 4 --tp 5 | does-not-divide tp 5 32
run nope.py | no-file nope.py

# Run files
init llama3-8c | no-file "'llama3-8b'" "'llama3-8c'"
init llama3-8b --schedule v-hlf | unknown-schedule "'v-half'"
init llama3-8b --cluster h10 | no-file h10
init llama3-8b --output x.json | bad-choice x.json .yaml .yml
init llama3-8b --output there.yaml | exists-already there.yaml
launch TINY --print --nodes 0 | bad-number --nodes 0
launch TINY --print --nodes 3 --master-addr x | does-not-divide 4 3
launch TINY --print --nodes 2 --node-rank 2 --master-addr x | bad-number 0 1
launch TINY --print --master-port 0 | bad-number --master-port 0
launch TINY --print --master-port 65536 | bad-number --master-port 65536
launch TINY --print --sbatch=--time=1 | conflicting-options --launcher
launch TINY --print --launcher slurm --srun=pmix | bad-syntax
grid ROOT/configs/grids/tiny-cpu.yaml --sbatch=-p | conflicting-options --sbatch -p --launcher
launch TINY --print -s pp=3 -s schedule=stock | does-not-divide 8 3
launch TINY --print -s dp=3 | does-not-divide 8 "1 x 3"
launch TINY --print -s dp=4 | does-not-fit 16 8
launch TINY --print -s tp=3 | does-not-divide 3 4
launch TINY --print -s tp=1000000000000 | bad-number tp 1000000000000 1,000,000
launch TINY --print -s chunks=-1 | bad-number chunks -1
launch TINY --print -s schedule=v-hlf | unknown-schedule v-half
launch TINY --print -s pipemem_memory_cap=0.1 | over-cap
launch TINY --print -s pipemem_offload=some | bad-type pipemem_offload
launch TINY --print -s pipemem_option=[1] | bad-type pipemem_option [1]
launch TINY --print -s "recompute_modules={a: 1}" | bad-type
launch TINY --print -s schedul.name=x | unknown-key schedule
launch TINY --print -s cluster.tflops=.inf | bad-number cluster.tflops inf
launch TINY --print -s script=nowhere.py | no-file nowhere.py
launch TINY --print -s data_path=nowhere | no-file data_path nowhere.bin
launch TINY --print -s "data_path='.5 msc://there .5 here'" | no-file here.bin
launch TINY --print -s megatron=[1] | old-key megatron
launch TINY --print --set=--lr=1 | bad-syntax --lr lr
launch TINY --print TE -s use_transformer_engine_op_fuser=true | unsupported-setting --use-transformer-engine-op-fuser
launch TINY --print TE -s bf16=true -s fp8_format=hybrid -s pipemem_recompute=full | fp8-delayed-scaling

# Sizes for which a command would take very long
simulate 1f1b -p 4 -m 100000000 | too-large 1,200,000,000 "559 GiB" "20 hours"
simulate 1f1b -p 100000 -m 4 | too-large 100000 4
simulate auto -p 4 -m 100000000 | too-large 100000000
simulate interleaved -p 4 -m 8 -v 1000000 | too-large 4 1000000
simulate seq1f1b -p 4 -m 8 -o slices=1000000 | too-large 4 1000000
simulate 1f1b -p 4 -m 8 --steps 100000000 | too-large --steps 100000000 8 --yes
show 1f1b -p 4 -m 100000000 | too-large 100000000
show 1f1b -p 4 -m 8 --steps 100000000 | too-large --steps 100000000 8 --yes
check 1f1b --write x.csv -p 4 -m 100000000 | too-large 100000000
check mine.csv -m 100000000 | too-large 100000000
pareto -p 4 -m 100000000 | too-large 100000000
layout llama3-8b -p 4 -m 100000000 | too-large 100000000
launch TINY --print -s global_batch=100000000 | too-large 100000000 4
"""
ROWS = [line for line in TABLE.splitlines() if line and not line.startswith("#")]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The working directory, with the files of the table."""
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(build_schedule("1f1b", num_devices=2, num_microbatches=4).to_csv())
    Path("wrong.csv").write_text("0B0,0F0\n")
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    Path("bytes.json").write_text('{"memory": {"F": 1000, "I": -300, "W": -700}}')
    Path("there.yaml").write_text("mine")
    Path("folder.yaml").mkdir()
    return tmp_path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0])
def test_what_is_refused(refuses, place, row):
    command, expected, *exit_code = row.split(" | ")
    command, expected = (
        re.sub(r"\b(TINY|ROOT|TE)\b", lambda name: NAMES[name[0]], text) for text in (command, expected)
    )
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    began = time.process_time()
    line = refuses(*shlex.split(command), code=int(*exit_code or ["2"]))
    assert time.process_time() - began < 20
    check_refusal(line, *shlex.split(expected))
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", [*load_commands()])
def test_no_command_takes_sizes_of_0(refuses, name):
    """Whatever else it wants: options are looked at first."""
    options = {option for parameter in load_commands()[name].params for option in parameter.opts}
    for option in {"--devices", "--microbatches"} & options:
        check_refusal(refuses(name, "x", option, 0), "bad-number", option, 0)


def test_a_plan_is_never_too_large(pipemem):
    limits = ("--only", "tp=1", "--only", "pp=4", "--only", "micro_batch=1", "--search-seconds", 0, "--json")
    done = pipemem("plan", NAMES["TINY"], "--set", "global_batch=100000000", *limits)
    assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)["plans"][0]
    assert best["microbatches"] == 50_000_000 and best["bubble_rate"] < 1e-6


def test_with_yes_it_goes_on(pipemem, monkeypatch):
    monkeypatch.setattr("megatron_pipemem.schedule.size.LARGE_SECONDS", 0)
    assert pipemem("simulate", "1f1b", "-p", 4, "-m", 8).exit_code == 2
    assert pipemem("simulate", "1f1b", "-p", 4, "-m", 8, "--yes").exit_code == 0


def test_sizes_that_people_train_with_are_not_asked_about():
    for p, m, v in ((16, 1024, 2), (64, 512, 2), (128, 128, 2), (8, 4096, 2)):
        assert not estimated(p, m, v).is_large, (p, m, v)


def test_only_orders_that_are_fitted_take_the_cube_of_the_devices():
    fitted = {family.name for family in families() if is_fitted(family.name)}
    assert {"v-half", "v-min", "1f1b-v", "hanayo"} <= fitted and is_fitted("auto")
    assert not fitted & {"1f1b", "interleaved", "gis", "zb-h1"} and not is_fitted("some.csv")
    assert estimated(500, 8, 1).is_large and not estimated(500, 8, 1, fitted=False).is_large
    began = time.process_time()
    simulate(build_schedule("1f1b", num_devices=500, num_microbatches=8))
    assert time.process_time() - began < 3 * estimated(500, 8, 1, fitted=False).seconds


def test_json_is_json(pipemem, tmp_path):
    """The largest prices there may be."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": 1e30, "backward_input": 1e30, "backward_weight": 0, "p2p": 1e30}))
    for name in ("1f1b", "v-half", "zb-auto"):
        done = pipemem("simulate", name, "-p", 4, "-m", 8, "--costs", costs, "--json")
        assert done.exit_code == 0, done.output

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        assert json.loads(done.stdout, parse_constant=refuse)["makespan"] > 1e31
