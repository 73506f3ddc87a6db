"""Hold the built-in schedule families. Each module writes down one group of families."""

ORDER = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zero_bubble",
    "gis",
    "v_shape",
    "offload",
    "one_f_one_b_v",
    "dualpipe_v",
    "hanayo",
    "bidirectional",
    "seq1f1b",
    "slimpipe",
    "asynchronous",
)
"""Of the table, from the simplest; modules that are not named come behind these."""
