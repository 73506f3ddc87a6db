"""Run pipelines that are never flushed on Megatron's training loop: PipeDream and PipeDream-2BW."""
