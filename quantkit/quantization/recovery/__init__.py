"""Training of scales and norms after all layers are quantized, so that the logits approach the original's."""
