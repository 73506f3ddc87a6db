"""The GPU benchmark's program, rehearsed on CPU: everything in it that is not a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lanes import nightly

pytestmark = nightly("test_offload_engine.py counts the bytes that move")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu" / "offload.py"
MICROBATCHES, HELD, SLOTS, LAYERS = 9, 5, 3, 2


def test_the_rehearsal_moves_and_holds_what_arithmetic_says(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, str(PROGRAM), "--rehearse", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert len(result["layers"]) == len(result["loops"]) == 4
    for layer, loop in zip(result["layers"], result["loops"], strict=True):
        hidden, sequence, batch = (int(part.split("=")[1]) for part in layer["shape"].split())
        heads = 2 if hidden == 32 else 4
        # Bytes per element: bf16 of the inputs of both norms, q, k, v, attention's output, MLP's 4 h; without recomputation
        # also both norms' outputs and GELU's. One fp32 per head and token comes from the softmax; the input stays.
        elements = batch * sequence * hidden
        stack = LAYERS * ((20 if layer["recompute"] else 32) * elements + 4 * heads * batch * sequence) - 2 * elements
        assert layer["moved_bytes"] == stack // LAYERS
        assert loop["moved_bytes"] == MICROBATCHES * stack
        assert loop["predicted_peak"] == -(HELD - SLOTS) * stack  # torch counts no memory on CPU: 0 less what is saved
        assert loop["host_peak"] >= (HELD - SLOTS) * stack
        assert loop["bit_identical"]
