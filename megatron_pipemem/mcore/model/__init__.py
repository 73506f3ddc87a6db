"""Megatron's models as schedules need them: placed on stages, with backwards that split."""
