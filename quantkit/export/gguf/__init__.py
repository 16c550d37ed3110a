"""Writes a checkpoint as one GGUF file, which llama.cpp and the programs that are built on it run."""
