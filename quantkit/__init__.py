"""quantkit: make an open-weights model smaller and faster, and measure what it cost."""

__version__ = "0.1.0"
