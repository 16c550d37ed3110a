"""Tokens of a request in OpenAI's words."""

from __future__ import annotations

from typing import Any

from quantkit.serving.turns import TurnUsage


def completion_usage(usage: TurnUsage) -> dict[str, Any]:
    """``usage`` of the chat and text completions."""
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning,
                                          "accepted_prediction_tokens": usage.accepted,
                                          "rejected_prediction_tokens": usage.rejected}}


def response_usage(usage: TurnUsage) -> dict[str, Any]:
    """``usage`` of the responses."""
    return {"input_tokens": usage.prompt, "output_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": usage.reasoning}}
