"""Running a model: loader, sampling, generation."""
