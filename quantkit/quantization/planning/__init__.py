"""What a run will do to each layer of a model, and the memory that takes, before anything is done."""
