"""Structured output: which tokens may follow, and what a turn's text means."""
