"""The built-in schedule families. Each module writes down one group of families and registers it."""
# ruff: noqa: I001 - imported in the order of the table

from __future__ import annotations

from megatron_pipemem.schedule.families import (  # noqa: F401 - imported to register
    gpipe,
    one_f_one_b,
    interleaved,
    looped_bfs,
    zero_bubble,
    zero_bubble_auto,
    gis,
    v_shape,
    offload,
    one_f_one_b_v,
    dualpipe_v,
    hanayo,
    bidirectional,
    seq1f1b,
    asynchronous,
)
