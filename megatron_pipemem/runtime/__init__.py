"""Execute a lowered schedule on one rank. This package uses torch and knows no Megatron."""
