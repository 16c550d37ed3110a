"""GPU kernels in Triton. Each file has one operation: its kernels, and a thin wrapper that takes tensors."""
