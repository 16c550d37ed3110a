"""Registries, the hooks that fill them, and the plugin manager."""
