"""Gates: conditions that a comparison must meet."""
