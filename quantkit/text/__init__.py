"""Text and tokens: the model's tokenizer and its chat template, for both halves."""
