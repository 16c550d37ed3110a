"""Where a model comes from: a folder, the hub, a GGUF file, an installed package, thin air."""
