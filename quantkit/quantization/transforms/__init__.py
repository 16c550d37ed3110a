"""Changes to a model that keep its function and make it easier to quantize."""
