"""Codecs: how a token's key or value is stored."""
