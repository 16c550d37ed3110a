"""GPU kernels in Triton, one operation a file, each with a thin wrapper: tensors in, tensor out."""
