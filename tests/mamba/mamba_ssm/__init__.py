"""What Megatron asks of the package ``mamba_ssm``, computed by PyTorch on any device, for tests: the real one needs Triton."""

__version__ = "2.2.4"
