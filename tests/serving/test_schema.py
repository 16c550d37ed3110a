"""What a refusal says, and that no number a request can write is a fault of the server."""

import json

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def refused(answer, param, code, said):
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert said in error["message"]


@pytest.mark.parametrize(("change", "param", "said"), [
    ({"stop": ["x"] * 17}, "stop", "17 items are given; at most 16"),
    ({"stop": "y" * 100_000}, "stop", "100000 characters are given; at most 1024"),
    ({"stop": ["a", "y" * 1025]}, "stop[1]", "1025 characters are given; at most 1024"),
    ({"stop": ["a", ""]}, "stop[1]", "empty"), ({"stop": 5}, "stop", "must be a string or a list"),
    ({"stop": {"a": 1}}, "stop", "must be a string or a list"), ({"stop": [5]}, "stop[0]",
                                                                 "must be a string"),
    ({"n": "2"}, "n", "must be an integer"), ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": 10**400}, "temperature", "must be a number"),
    ({"stream": 1}, "stream", "must be a boolean"), ({"stream_options": 3}, "stream_options", "an object"),
])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_value_that_cant_be_is_explained(shared, path, change, param, said):
    body = {"messages": [USER], **change} if path == CHAT else {"prompt": "a", **change}
    refused(shared.post(path, body), param, "invalid_value", said)


@pytest.mark.parametrize(("message", "param", "code", "said"), [
    ({"role": "tool", "content": "3"}, "tool_call_id", "missing_parameter", "which call"),
    ({"tool_call_id": "a", "role": "tool"}, "content", "missing_parameter", "content is missing"),
    ({"role": "function", "name": "f", "content": "3"}, "role", "unsupported_parameter", "role 'function'"),
    ({"role": "bot", "content": "3"}, "role", "invalid_value", "'assistant'"),
    ({"role": None, "content": "3"}, "role", "missing_parameter", "null"),
    ({"role": "user", "content": None}, "content", "missing_parameter", "content is null"),
    ({"role": "user"}, "content", "missing_parameter", "missing"),
    ({"role": "assistant", "content": None}, "content", "missing_parameter", "content is null"),
    ({"role": "assistant", "content": None, "tool_calls": []}, "content", "missing_parameter",
     "content is null"),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls", "unsupported_parameter",
     "only assistant"),
    ({"role": "assistant", "tool_calls": [{**CALL, "type": "web"}]}, "tool_calls[0].type", "invalid_value",
     "function"),
    ({"role": "user", "content": "x", "reasoning_content": "y"}, "reasoning_content", "unsupported_parameter",
     "only assistant"),
    ({"role": "assistant", "content": "", "refusal": "no"}, "refusal", "unsupported_parameter",
     "refusal is not"),
    ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call",
     "unsupported_parameter", "not supported"),
    ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id", "unsupported_parameter",
     "not supp"),
    ({"role": "user", "content": "x", "name": "n" * 65}, "name", "invalid_value", "65 characters"),
    ({"role": "user", "content": 5}, "content", "invalid_value", "must be a string or a list"),
    ({"role": "user", "content": [5]}, "content[0]", "invalid_value", "must be an object"),
    ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "missing_parameter", "missing"),
    ({"role": "user", "content": [{"type": "text", "text": None}]}, "content[0].text", "missing_parameter",
     "null"),
    (5, "", "invalid_value", "must be an object"), (None, "", "invalid_value", "must be an object"),
])
def test_a_message_that_cant_be_is_explained(strict, message, param, code, said):
    answer = strict.post(CHAT, {"messages": [USER, message]})
    refused(answer, f"messages[1].{param}".rstrip("."), code, said)


@pytest.mark.parametrize(("body", "param", "code", "said"), [
    ({"messages": None}, "messages", "missing_parameter", "null"),
    ({}, "messages", "missing_parameter", "missing"), ({"messages": []}, "messages", "invalid_value",
                                                       "empty"),
    ({"messages": "hi"}, "messages", "invalid_value", "must be a list"),
    ({"messages": [USER], "top_logprobs": 3}, "top_logprobs", "invalid_value", "needs logprobs"),
    ({"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value",
     "differ"),
    ({"messages": [USER], "presence_penalty": False}, "presence_penalty", "invalid_value", "a number"),
    ({"messages": [USER], "reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter",
     "not supp"),
])
def test_a_chat_that_cant_be_is_explained(strict, body, param, code, said):
    refused(strict.post(CHAT, body), param, code, said)


def test_what_asks_for_nothing_is_taken(shared):
    neutral = {"reasoning_effort": "none", "verbosity": "medium", "tool_choice": "none", "audio": None,
               "frequency_penalty": 0.0, "max_tokens": 1}
    earlier = {"role": "assistant", "content": "x", "refusal": None, "audio": None, "function_call": None,
               "tool_calls": [], "annotations": None, "name": None}
    assert shared.post(CHAT, {"messages": [USER, earlier, USER], **neutral}).status_code == 200


TINY = [0, -0.0, 5e-324, 1e-310, 1e-45, 1.2e-38, 1e-9]
NUMBERS = {
    "temperature": [*TINY, 1e-4, 2, 2.0000000001, 1e308], "top_p": [*TINY, 0.9999999999999999, 1, 1e308],
    "min_p": [*TINY, 0.9999999999999999, 1, 1.0000000001, 1e308],
    "repetition_penalty": [*TINY, 0.01, 0.9999999999999999, 100, 1e308],
    "seed": [-2**63, -2**63 - 1, -1, 0, 2**53 + 1, 2**63 - 1, 2**63, 10**400],
    "top_k": [0, 1, 2**31 - 1, 2**31, 10**400], "max_tokens": [-2**63, -1, 0, 2**31, 2**63, 10**400],
    "n": [-2**63, 0, 16, 2**63, 10**400], "logprobs": [-1, 0, 20, 21, 2**63, 10**400],
    "presence_penalty": [*TINY, 1e308], "frequency_penalty": [*TINY, 1e308], "best_of": [0, 1, 10**400],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_extreme_numbers_are_obeyed_or_refused(shared, name):
    statuses = set()
    for value in [*NUMBERS[name], *(-value for value in NUMBERS[name])]:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 2, "temperature": 1, name: value}
        with shared.http as client:
            answer = client.post(TEXT, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (value, answer.text)
        statuses.add(answer.status_code)
    assert statuses == {200, 400} and not shared.errors


def test_a_whole_number_may_have_a_point(shared):
    """As JSON schemas have it."""
    whole = {"max_tokens": 2, "n": 2, "top_k": 5, "logprobs": 1, "seed": 3}
    written = {name: float(value) for name, value in whole.items()}
    for prompt in ([5, 6], [[5, 6], [7]]):
        found = [shared.post(TEXT, {"prompt": prompt, **whole}), shared.post(TEXT, {
            "prompt": json.loads(json.dumps(prompt).replace("6", "6.0").replace("7", "7.0")), **written})]
        assert found[0].json()["choices"] == found[1].json()["choices"]
    for wrong in (1.5, 1e300, True, "1"):
        assert shared.post(TEXT, {"prompt": [5, wrong]}).status_code == 400
        assert shared.post(TEXT, {"prompt": [5], "n": wrong}).status_code == 400


def test_extreme_numbers_together(shared):
    for top_p in TINY:
        body = {"prompt": "the cat", "max_tokens": 3, "n": 3, "temperature": 2, "top_p": top_p,
                "min_p": 5e-324,
                "repetition_penalty": 0.01, "top_k": 2**31 - 1, "seed": 2**63 - 1, "logprobs": 20,
                "echo": True}
        assert shared.post(TEXT, body).status_code == 200
