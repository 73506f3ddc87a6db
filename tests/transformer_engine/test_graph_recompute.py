"""Replayed steps that recompute parts of layers equal steps without graphs and recomputation to the bit; a fault is found."""

from __future__ import annotations

from lanes import nightly
from test_graph_fp8 import printed_for


def test_replayed_steps_equal_plain_steps_and_a_fault_is_found():
    names = ("v-half", "zb-h1, mxfp8")
    shown = printed_for(*names, "faults", program="graph_recompute.py")
    assert shown["models"] == dict.fromkeys(names, 0) and shown["faults"] > 0


@nightly("the cases above")
def test_parts_and_layers_are_recomputed_with_current_scaling():
    names = ("zb-h1, tensorwise", "zb-h1, layers", "v-half, tensorwise, hybridep")
    assert printed_for(*names, program="graph_recompute.py")["models"] == dict.fromkeys(names, 0)
