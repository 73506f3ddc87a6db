"""Factors of microbatches that differ, and are the same whenever a batch is read again."""

from __future__ import annotations


def weight(batch: dict) -> tuple[float, float]:
    """By the sum of the tokens."""
    return 0.25 + int(batch["tokens"].sum()) % 97 / 16, 1.0
