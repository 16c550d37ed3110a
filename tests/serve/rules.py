"""For schemathesis: rules between fields that a JSON schema does not say, kept in what is otherwise valid."""

from typing import Any

import schemathesis

MOST, CONTEXT = 3, 8192
"""Tokens of an answer, so that many fit in little time, and of the model's context."""


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) in (int, float) and low <= value <= high and value == int(value)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Keep the rules; what is wrong by itself stays wrong."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    for name in ("max_tokens", "max_completion_tokens"):  # which must be equal
        if _whole(body.get(name), 1, CONTEXT - 1):
            body[name] = MOST
    if all(body.get(name) is None for name in ("max_tokens", "max_completion_tokens")):
        body["max_tokens"] = MOST
    if _whole(body.get("top_logprobs"), 0, 20) and body.get("logprobs") in (None, False):
        body["logprobs"] = True
    if _whole(body.get("best_of"), 1, 16):
        body["best_of"] = body.get("n") or 1
    return body
