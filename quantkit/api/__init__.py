"""The functions and classes that ``import quantkit`` gives, and that the commands call."""
