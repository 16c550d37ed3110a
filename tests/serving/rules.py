"""For schemathesis: rules between fields that a JSON schema does not say, kept in what is otherwise valid.

Only values that their own schema allows are changed, so that what is wrong by itself stays wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import schemathesis

MOST = 3
CONTEXT = 8192
QUEUE = 64
VOCABULARY = 300
"""Tokens of an answer, few so that it is short, and of the context; requests that may wait; token ids."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
SIMPLE = {"kv": (256, "int8"), "regex": (2**13, "[a-z]+"), "guided_regex": (2**13, "[a-z]+"),
          "grammar": (2**16, 'start: "a"'), "guided_grammar": (2**16, 'start: "a"'),
          "arguments": (2**16, "{}"), "json": (2**17, "{}"), "guided_json": (2**17, "{}")}
"""Up to which length a text is replaced, and by what."""
LONG = {2**14, 2**14 - 1}
"""Lengths that are allowed; several such texts don't fit the context."""
MANY = {"messages": 4096, "tools": 128, "tool_calls": 128, "content": 1024, "system": 1024, "input": 4096}
"""Lists of up to so many are allowed; as many don't fit the context."""
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
TEXTS, CHOICES = ("prompt", "input"), ("choice", "guided_choice")
"""Texts, which must have a token, and choices, which the vocabulary must be able to write."""


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) in (int, float) and low <= value <= high and value == int(value)


def _named(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 128


def _asks(value: Any) -> bool:
    return value not in (None, False, {}, []) and value != {"type": "text"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Keep the rules; what is wrong by itself stays wrong."""
    if not isinstance(case.body, dict):
        return
    body = case.body = _valid_texts(case.body)
    _lengths(body, case.path)
    for message in body["messages"] if isinstance(body.get("messages"), list) else []:
        if isinstance(message, dict):
            _message(message)
    if "/messages" in case.path:
        for message in body["messages"] if isinstance(body.get("messages"), list) else []:
            if isinstance(message, dict):
                _blocks(message)
        last = body["messages"][-1] if isinstance(body.get("messages"), list) and body["messages"] else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            last["role"] = "user"
    if case.path == "/tokenize":
        _tokenize(body)
    else:
        _structure(body)
        _tools(body)


def _valid_texts(value: Any, key: str = "") -> Any:
    """A copy in which texts and objects that mean something beyond their schema mean something simple."""
    if isinstance(value, dict):
        if key in ("parameters", "input_schema", "schema", "json", "guided_json"):
            return SCHEMA
        if key == "logit_bias" and all(name.isdigit() for name in value):
            return {str(int(name) % VOCABULARY): bias for name, bias in value.items()}
        return {name: _valid_texts(item, name) for name, item in value.items()}
    if isinstance(value, list):
        most = MANY.get(key, 0)
        # one text more than embeddings take stays one too many
        fits = 3 < len(value) <= most and (key, len(value)) != ("input", 2049)
        kept = key if key in TEXTS + CHOICES else ""
        return [_valid_texts(item, kept) for item in (value[:3] if fits else value)]
    if value == "" and key in TEXTS:
        return "a"
    if isinstance(value, str) and value:
        if key in CHOICES:
            return "".join(letter if " " <= letter <= "~" else "a" for letter in value)
        limit, simple = SIMPLE.get(key, (0, ""))
        if len(value) <= limit:
            return simple
        return value[:100] if len(value) in LONG else value
    return value


def _lengths(body: dict[str, Any], path: str) -> None:
    prompt = body.get("prompt")
    lists = [prompt, *prompt] if isinstance(prompt, list) else []
    most = max(min([MOST, *(CONTEXT - len(one) for one in lists if isinstance(one, list))]), 1)
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
    for name in names:  # of which the first two must be equal
        if body.get(name) != 0 and _whole(body.get(name), -1, 2**31):
            body[name] = most
    if all(body.get(name) is None for name in names):
        field = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens",
                 "/v1/completions": "max_tokens", "/v1/chat/completions": "max_tokens"}.get(path)
        if field is not None:
            body[field] = most
    if _whole(body.get("top_logprobs"), 0, 20) and body.get("logprobs") in (None, False):
        body["logprobs"] = True
    if isinstance(prompt, list) and _whole(body.get("n"), 1, 16) and len(prompt) * body["n"] > QUEUE:
        body["n"] = 1
    if _whole(body.get("best_of"), 1, 16):
        body["best_of"] = body.get("n") or 1


def _message(message: dict[str, Any]) -> None:
    """What only one role's messages may have."""
    if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        return
    if any(message.get(name) not in (None, [], "") for name in (
            "tool_calls", "reasoning_content", "reasoning")):
        message["role"] = "assistant"
        if isinstance(message.get("tool_call_id"), str):
            del message["tool_call_id"]
    elif message.get("tool_call_id") is not None:
        message["role"] = "tool"
    elif message["role"] == "tool":
        message["role"] = "user"
    if message.get("content") is None and not message.get("tool_calls"):
        message["content"] = "a"


def _blocks(message: dict[str, Any]) -> None:
    """Anthropic's blocks that only one role's turns may have."""
    if message.get("role") in ("user", "assistant", "system") and isinstance(message.get("content"), list):
        for block in message["content"]:
            if isinstance(block, dict) and block.get("type") in (
                    "tool_use", "thinking", "redacted_thinking", "tool_result"):
                block.clear()
                block.update(type="text", text="a")


def _tokenize(body: dict[str, Any]) -> None:
    if body.get("messages") is not None and isinstance(body.get("prompt"), str):
        del body["prompt"]
    if body.get("messages") is None and body.get("prompt") is None:
        body["prompt"] = "a"
    if body.get("messages") is None and any(body.get(name) for name in ("tools", "chat_template_kwargs")):
        body["messages"] = [{"role": "user", "content": "a"}]
        if isinstance(body.get("prompt"), str):
            del body["prompt"]
    if body.get("messages") is not None and body.get("add_special_tokens") is True:
        body["add_special_tokens"] = False
    _tools(body)


def _structure(body: dict[str, Any]) -> None:
    """One structure at most; of ``structured_outputs`` one part."""
    several = body.get("structured_outputs")
    if isinstance(several, dict):
        kinds = [name for name in ("choice", "json", "json_object", "regex", "grammar")
                 if _asks(several.get(name))]
        for name in kinds[1:]:
            if isinstance(several[name], bool) or _may_go(several[name]):
                del several[name]
    wanted = body.get("response_format")
    if _asks(several) and isinstance(wanted, dict) and wanted.get("type") in ("json_object", "json_schema"):
        body["response_format"] = {"type": "text"}
    kinds = [name for name in ("response_format", "structured_outputs", *GUIDED) if _asks(body.get(name))]
    for name in kinds[1:]:
        if name in GUIDED and _may_go(body[name]):
            del body[name]


def _may_go(value: Any) -> bool:
    """Whether it is right by itself, so that nothing wrong is lost with it."""
    if isinstance(value, list):
        return len(value) <= 512 and all(isinstance(item, str) and 0 < len(item) <= 1000 for item in value)
    return isinstance(value, str) or value == SCHEMA


def _tools(body: dict[str, Any]) -> None:
    """Different names, and a choice that fits."""
    tools, names = body.get("tools"), []
    for number, tool in enumerate(_with_nested(body)):
        holder = tool.get("function", tool) if isinstance(tool, dict) else None
        form = tool.get("format") if isinstance(tool, dict) else None
        if isinstance(form, dict) and isinstance(form.get("definition"), str):  # one that can be kept
            form["definition"] = "a+" if form.get("syntax") == "regex" else 'start: "a"'
        if isinstance(holder, dict) and _named(holder.get("name")):
            if holder["name"] in names:
                holder["name"] = f"tool{number}"
            names.append(holder["name"])
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    text = body.get("text") if isinstance(body.get("text"), dict) else {}
    output = body.get("output_config") if isinstance(body.get("output_config"), dict) else {}
    structured = any(map(_asks, (body.get("response_format"), body.get("structured_outputs"),
                                 text.get("format"),
                                 output.get("format"), *(body.get(name) for name in GUIDED))))
    known = ("none", "auto", "required", "function", "custom", "any", "tool")
    if (structured and tools) or (not names and kind in ("required", "function", "custom", "any", "tool")):
        if kind is None or kind in known:
            chosen = isinstance(choice, dict) and kind not in ("function", "custom")
            anthropic = "input_schema" in str(tools) or chosen or output
            body["tool_choice"] = {"type": "none"} if anthropic else "none"
    elif names and isinstance(choice, dict) and kind in ("function", "custom", "tool"):
        holder = choice.get("function", choice)
        if len(names) > len(tools or []) or "namespace" in str(tools):  # whose tools have other names then
            body["tool_choice"] = "auto"
        elif isinstance(holder, dict) and _named(holder.get("name")):
            holder["name"] = names[0]


def _with_nested(body: dict[str, Any]) -> Iterator[Any]:
    """Tools of a body and of its input's items, and those of namespaces."""
    items = body.get("input") if isinstance(body.get("input"), list) else []
    for holder in (body, *items):
        tools = holder.get("tools") if isinstance(holder, dict) else None
        for tool in tools if isinstance(tools, list) else []:
            yield tool
            if isinstance(tool, dict) and isinstance(tool.get("tools"), list):
                yield from tool["tools"]
