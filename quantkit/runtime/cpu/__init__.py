"""Runs a model on a CPU as one program: a step is one call into machine code."""
