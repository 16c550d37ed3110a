"""Where independent work is done."""
