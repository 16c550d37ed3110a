"""How fast this machine runs a model and its kernels, beside what its memory allows."""
