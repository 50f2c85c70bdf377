"""Optimizer state, gradients and parameters sharded over devices: ZeRO stages 1 and 2, and FSDP2."""
