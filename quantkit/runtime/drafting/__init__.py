"""Drafts: tokens that are guessed, so that one step of the model can confirm several."""
