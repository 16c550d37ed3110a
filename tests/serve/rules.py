"""For schemathesis: rules between fields that a JSON schema does not say, kept in what is otherwise valid."""

from typing import Any

import schemathesis

MOST, CONTEXT, QUEUE = 3, 8192, 64
"""Tokens of an answer, few so that it is short, and of the model's context; requests that may wait."""


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) in (int, float) and low <= value <= high and value == int(value)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Keep the rules; what is wrong by itself stays wrong."""
    if not isinstance(case.body, dict):
        return
    body = case.body = dict(case.body)
    prompt = body.get("prompt")
    lists = [prompt, *prompt] if isinstance(prompt, list) else []
    most = max(min([MOST, *(CONTEXT - len(one) for one in lists if isinstance(one, list))]), 1)
    for name in ("max_tokens", "max_completion_tokens"):  # which must be equal
        if _whole(body.get(name), 1, CONTEXT - 1):
            body[name] = most
    if all(body.get(name) is None for name in ("max_tokens", "max_completion_tokens")):
        body["max_tokens"] = most
    if _whole(body.get("top_logprobs"), 0, 20) and body.get("logprobs") in (None, False):
        body["logprobs"] = True
    if isinstance(prompt, list) and _whole(body.get("n"), 1, 16) and len(prompt) * body["n"] > QUEUE:
        body["n"] = 1
    if _whole(body.get("best_of"), 1, 16):
        body["best_of"] = body.get("n") or 1
