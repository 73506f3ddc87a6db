"""What the tools ask of an installed Megatron: its flags, the recipes of Megatron-Bridge, and the times of its layers."""
