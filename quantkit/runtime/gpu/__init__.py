"""Runs a model on a GPU: the same calls as on a CPU, a step of decoding as one graph."""
