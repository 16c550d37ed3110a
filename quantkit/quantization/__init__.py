"""From a source and a recipe to a checkpoint."""
