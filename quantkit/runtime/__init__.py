"""Running a model: loader, tokenizer, chat template, sampling, generation."""
