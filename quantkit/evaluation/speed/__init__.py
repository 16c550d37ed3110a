"""Speed and memory of a model, measured in a process of its own."""
