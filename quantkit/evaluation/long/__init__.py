"""What a KV setting does at length: retrieval, likelihood by position, errors that compound."""
