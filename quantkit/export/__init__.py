"""A finished checkpoint in another layout, and its upload to the hub."""
