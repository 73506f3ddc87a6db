"""What Megatron asks of the package ``fla``, computed by PyTorch on any device, for tests: the real one needs Triton."""
