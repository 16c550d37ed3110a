"""What fits a machine: weights and KV cache together, for so many sequences of such a length."""
