"""What a model lost and what it gained: quality, speed and memory, by one stated protocol."""
