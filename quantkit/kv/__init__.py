"""The KV cache: what attention remembers of earlier positions."""
