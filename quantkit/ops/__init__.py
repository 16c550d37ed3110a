"""One function an operation; behind each, the first kernel that accepts the case."""
