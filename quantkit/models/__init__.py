"""Architectures as short declarative files over shared layers."""
