"""The one model of memory: what weights, the KV cache, a step, a server and a quantization take, in bytes."""
