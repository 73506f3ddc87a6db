"""Stand-in of flash-attn 2 in PyTorch, as far as Transformer Engine's Python calls it.

Beside this package lie the version that Transformer Engine looks up, and ``flash_attn_2_cuda``, which it imports.
"""

from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
