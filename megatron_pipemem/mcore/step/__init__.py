"""Run one training step: the replacement of Megatron's pipelined forward-backward functions, and its parts."""
