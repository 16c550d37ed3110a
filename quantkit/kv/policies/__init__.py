"""Policies: which positions stay."""
