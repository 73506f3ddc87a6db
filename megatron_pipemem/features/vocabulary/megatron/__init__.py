"""Vocabulary parallelism for stock Megatron models: their embedding and head cut over the pipeline's ranks."""
