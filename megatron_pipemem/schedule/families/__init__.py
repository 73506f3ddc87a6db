"""The built-in schedule families. Every module that has a ``Family`` among its names adds it to the table."""

ORDER = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "looped_bfs",
    "zero_bubble",
    "zero_bubble_auto",
    "gis",
    "v_shape",
    "offload",
    "one_f_one_b_v",
    "dualpipe_v",
    "hanayo",
    "bidirectional",
    "seq1f1b",
    "asynchronous",
)
"""Of the table, from the simplest; modules that are not named come behind these."""
