"""Checkpoints that other tools made, read strictly: GPTQ, AWQ, compressed-tensors, bitsandbytes, MLX."""
