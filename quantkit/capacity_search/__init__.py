"""The search for what fits: weights and a KV setting for an amount of memory, by their expected loss."""
