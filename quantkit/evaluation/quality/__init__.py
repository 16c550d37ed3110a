"""Quality: how a model's predictions on the windows of a text differ from the reference's."""
