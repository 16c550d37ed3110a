"""Results → something to look at or to compute with."""
