"""CPU kernels of our own: emitted from Python through LLVM, compiled on first use, no compiler needed."""
