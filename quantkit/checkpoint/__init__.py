"""Checkpoints: written whole or not at all, resumable, and read back with every doubt checked."""
