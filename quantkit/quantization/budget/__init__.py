"""Mixed precision: how many bits each layer gets, measured and solved for a budget."""
