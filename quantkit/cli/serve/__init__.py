"""``quantkit serve-local``: its options, the models that it loads, and the memory that they take."""
