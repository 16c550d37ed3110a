"""Other tools as rows of a comparison, by quantkit's own protocol."""
