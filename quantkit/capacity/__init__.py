"""What fits a machine: weights and KV cache together, for a number of sequences of a given length."""
