"""Stand-in of flash-attn's compiled extension, whose backward Transformer Engine imports and does not call."""

varlen_bwd = None
