"""How quantized weights lie in memory and on disk."""
