"""Megatron asks for the version of ``causal_conv1d`` before Mamba layers take packed documents, and calls nothing."""

__version__ = "1.4.0"
