"""Executes a lowered schedule on one rank. Uses torch and knows no Megatron."""
