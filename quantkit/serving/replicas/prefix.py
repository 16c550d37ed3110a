"""How a request's prompt begins, as the names of its blocks of characters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BLOCK = 64
"""Characters. The prefix cache shares blocks of 64 tokens, and hardly a token is less than a character."""
MAX_CHARACTERS = 2**18
"""Of a prompt, from its beginning on."""
WRITING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Paths of requests that take up what the prefix cache has."""


def prefix_blocks(path: str, body: bytes, tenant: bytes = b"") -> tuple[int, ...]:
    """Names of a prompt's blocks. Two prompts have as many names in common as they have equal blocks at their
    beginning; models, KV settings, salts and tenants, whose caches are apart, have none in common.

    The names are of the text as the request has it: the tokens would be more exact, but only a replica has
    the tokenizer and the chat template.

    Args:
        path: The path of the request.
        body: The bytes of its body.
        tenant: The owner of the request, see :data:`~quantkit.serving.guard.TENANT`.

    Returns:
        One name for each complete block; none for what isn't a prompt.
    """
    if path not in WRITING:
        return ()
    try:
        values = json.loads(body)
        text = _beginning(values) if isinstance(values, dict) else ""
    except (ValueError, RecursionError):
        return ()  # a replica says what is wrong
    names, name = [], hash(tenant)
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        name = hash((name, text[start:start + BLOCK]))
        names.append(name)
    return tuple(names)


def _beginning(values: dict[str, Any]) -> str:
    out, length = [], 0
    for part in _parts(values):
        out.append(part)
        length += len(part)
        if length >= MAX_CHARACTERS:
            break
    return "".join(out)[:MAX_CHARACTERS]


def _parts(values: dict[str, Any]) -> Iterator[str]:
    """The text in the order in which templates write it."""
    yield json.dumps([values.get(key) for key in ("model", "kv", "cache_salt")])
    for key in ("tools", "system", "instructions"):
        if values.get(key):
            yield json.dumps(values[key], sort_keys=True)
    for key in ("messages", "input", "prompt"):
        value = values.get(key)
        if isinstance(value, list):  # what comes next mustn't change what stands before it
            yield from (json.dumps(item, sort_keys=True) for item in value)
        elif isinstance(value, str):
            yield value
