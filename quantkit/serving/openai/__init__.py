"""OpenAI's API, and what vLLM adds to it: one pair of files (request, answer) for each route."""
