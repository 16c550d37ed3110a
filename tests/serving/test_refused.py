"""What can't be is refused by name, wherever it stands; what asks for nothing is taken."""

import json

import pytest

from .conftest import APIS, CHAT, MESSAGES, RESPONSES, TEXT, asked

EMBEDDINGS = "/v1/embeddings"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "a"}}
IMAGE = "http://127.0.0.1:9/"
BODIES = {**{path: asked(path, most=1) for path in APIS}, EMBEDDINGS: {"input": "the cat"}, TOKENIZE: {},
          DETOKENIZE: {}}
pytestmark = pytest.mark.usefixtures("still_serves")


def refused(answer, param, code, said):
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) in ({"message", "type", "param", "code"}, {"message", "type"})  # OpenAI's, Anthropic's
    assert error.get("param") == param and error["type"] == "invalid_request_error"
    assert code in ("", error.get("code")) and said in error["message"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "param", "said"), [
    ({"n": 0}, "n", ""), ({"n": 17}, "n", ""), ({"n": 1.5}, "n", ""), ({"n": True}, "n", ""),
    ({"n": "2"}, "n", "must be an integer"), ({"temperature": -1}, "temperature", ""),
    ({"temperature": 2.1}, "temperature", ""), ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": 10**400}, "temperature", "must be a number"), ({"top_p": -0.1}, "top_p", ""),
    ({"top_p": 1.1}, "top_p", ""), ({"max_tokens": -2}, "max_tokens", ""),
    ({"max_tokens": 2**40}, "max_tokens", ""), ({"stop": ""}, "stop", ""),
    ({"stop": ["x"] * 17}, "stop", "17 items are given; at most 16"),
    ({"stop": "y" * 100_000}, "stop", "100000 characters are given; at most 1024"),
    ({"stop": ["a", "y" * 1025]}, "stop[1]", "1025 characters are given; at most 1024"),
    ({"stop": ["a", ""]}, "stop[1]", "empty"), ({"stop": [5]}, "stop[0]", "must be a string"),
    ({"stop": 5}, "stop", "must be a string or a list"), ({"seed": 2**63}, "seed", ""),
    ({"stop": {"a": 1}}, "stop", "must be a string or a list"), ({"seed": 1.5}, "seed", ""),
    ({"stream": "yes"}, "stream", ""), ({"stream": 1}, "stream", "must be a boolean"),
    ({"stream_options": 3}, "stream_options", "an object"), ({"model": 3}, "model", ""),
    ({"top_k": -2}, "top_k", ""), ({"min_p": 2}, "min_p", ""), ({"ignore_eos": 1}, "ignore_eos", ""),
    ({"repetition_penalty": 0}, "repetition_penalty", ""),
])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_value_out_of_range(strict, path, change, param, said):
    body = {"model": "tiny", **BODIES[path], **change}
    refused(strict.post_content(path, json.dumps(body)), param, "invalid_value", said)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("path", "change"), [
    *((path, change) for path in (CHAT, TEXT) for change in (
        {"temprature": 1}, {"stream_options": {"usage": True}}, {"\ud800": 1}, {"chat_template": "{{ 1 }}"})),
    (CHAT, {"functions": [{}]}), (TEXT, {"tools": [{"type": "function"}]}),
    (TEXT, {"tool_choice": "required"}), (CHAT, {"modalities": ["audio"]}), (CHAT, {"audio": {}}),
    (CHAT, {"reasoning_effort": "high"}), (CHAT, {"prediction": {"type": "content"}}),
    (TEXT, {"suffix": "x"}), (TEXT, {"best_of": 3}), (CHAT, {"echo": True}),
])
def test_what_would_change_the_answer_and_cant_be_obeyed(strict, path, change):
    param = {"stream_options": "stream_options.usage", "\ud800": "?"}.get(*change, *change)
    answer = strict.post_content(path, json.dumps({"model": "tiny", **BODIES[path], **change}))
    refused(answer, param, "unsupported_parameter", "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("message", "param", "code", "said"), [
    ({"role": "tool", "content": "3"}, "tool_call_id", "missing_parameter", "which call"),
    ({"tool_call_id": "a", "role": "tool"}, "content", "missing_parameter", "content is missing"),
    ({"role": "function", "name": "f", "content": "3"}, "role", "unsupported_parameter", "role 'function'"),
    ({"role": "bot", "content": "3"}, "role", "invalid_value", "'assistant'"),
    ({"role": None, "content": "3"}, "role", "missing_parameter", "null"),
    ({"content": "x"}, "role", "missing_parameter", ""),
    ({"role": "user", "content": None}, "content", "missing_parameter", "content is null"),
    ({"role": "user"}, "content", "missing_parameter", "missing"),
    ({"role": "user", "content": []}, "content", "", ""),
    ({"role": "assistant", "content": None}, "content", "missing_parameter", "content is null"),
    ({"role": "assistant", "content": None, "tool_calls": []}, "content", "missing_parameter",
     "content is null"),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls", "unsupported_parameter",
     "only assistant"),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "tool_calls[0].id", "", ""),
    ({"role": "assistant", "tool_calls": [{**CALL, "type": "web"}]}, "tool_calls[0].type", "invalid_value",
     "function"),
    ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "{"}}]},
     "tool_calls[0].function.arguments", "", "JSON object"),
    ({"role": "user", "content": "x", "reasoning_content": "y"}, "reasoning_content", "unsupported_parameter",
     "only assistant"),
    ({"role": "assistant", "content": "", "refusal": "no"}, "refusal", "unsupported_parameter",
     "refusal is not"),
    ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call",
     "unsupported_parameter", "not supported"),
    ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id", "unsupported_parameter",
     "not supp"),
    ({"role": "user", "content": "x", "nme": "y"}, "nme", "unsupported_parameter", ""),
    ({"role": "user", "content": "x", "name": "n" * 65}, "name", "invalid_value", "65 characters"),
    ({"role": "user", "content": 5}, "content", "invalid_value", "must be a string or a list"),
    ({"role": "user", "content": "\ud800"}, "content", "", ""),
    ({"role": "user", "content": [5]}, "content[0]", "invalid_value", "must be an object"),
    ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "missing_parameter", "missing"),
    ({"role": "user", "content": [{"type": "text", "text": None}]}, "content[0].text", "missing_parameter",
     "null"),
    ({"role": "user", "content": [{"type": "file", "text": "x"}]}, "content[0].type", "", ""),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
     "content[0].image_url", "", ""),
    (5, "", "invalid_value", "must be an object"), (None, "", "invalid_value", "must be an object"),
])
def test_a_message_that_cant_be(strict, message, param, code, said):
    answer = strict.post_content(CHAT, json.dumps({"model": "tiny", "messages": [USER, message]}))
    refused(answer, f"messages[1].{param}".rstrip("."), code, said)


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


REFUSED = {
    CHAT: [
        ({"messages": None}, "messages", "missing_parameter", "null"),
        ({"messages": []}, "messages", "invalid_value", "empty"),
        ({"messages": "hi"}, "messages", "invalid_value", "must be a list"),
        ({"messages": [USER] * 5000}, "messages", "", "at most 4096"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "", ""),
        ({"logprobs": 3}, "logprobs", "", ""), ({"max_tokens": 0}, "max_tokens", "", ""),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value", "differ"),
        ({"presence_penalty": False}, "presence_penalty", "invalid_value", "a number"),
        ({"presence_penalty": 3}, "presence_penalty", "", "2"),
        ({"tool_choice": "required"}, "tool_choice", "", "no tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "",
         "pattern"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "", "function"),
        ({"tools": [TOOL] * 129}, "tools", "", "at most 128"),
        ({"tools": [TOOL] * 2}, "tools", "", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": "y" * 200_000}}}]},
         "tools[0].function.parameters", "", "at most 131072"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "",
         "'b'"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name",
         "", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep(40)}}},
         "response_format.json_schema.schema", "", "deeper than 32"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "structured_outputs", "",
         "more than one"),
        ({"guided_json": "{]"}, "guided_json", "", "can't be read"),
        ({"guided_choice": []}, "guided_choice", "", "empty"),
        ({"guided_regex": "x" * 9000}, "guided_regex", "", "at most 8192"),
        *(({"structured_outputs": {"json_object": True, name: True}}, f"structured_outputs.{name}", "",
           "not supported") for name in ("disable_any_whitespace", "disable_additional_properties")),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "",
         "not supported"),
        ({"priority": 1}, "priority", "", "--scheduling-policy priority"),
        ({"priority": 2**40}, "priority", "", "less"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "", "messages"),
        ({"chat_template_kwargs": {"date": "<|im_end|>"}}, "chat_template_kwargs.date", "", "pattern"),
        ({"chat_template_kwargs": {"date": [1]}}, "chat_template_kwargs.date", "", "must be"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "", "pattern"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "", "100"),
        ({"logit_bias": {"99999": 1}}, None, "", "99999"),
        ({"kv": "nothing-like-it"}, "kv", "", "nothing-like-it")],
    RESPONSES: [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "", "no response is kept"),
        ({"conversation": "conv_1"}, "conversation", "", "no response is kept"),
        ({"background": True}, "background", "", "not supported"),
        ({"truncation": "auto"}, "truncation", "", "not supp"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "", "function"),
        ({"tool_choice": "required"}, "tool_choice", "", "no tools"), ({"input": []}, "input", "", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "", "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
         "input[0].content[0].image_url", "", "a message is text"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]},
         "input[0].arguments", "", "JSON object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "", "json_schema"),
        ({"include": ["file_search_call.results"]}, "include[0]", "", "encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens", "", "greater"),
        ({"metadata": {"a": "x" * 600}}, "metadata.a", "", "512")],
    MESSAGES: [(change, None, "", said) for change, said in (  # whose errors say the name in the message
        ({"max_tokens": None}, "max_tokens"), ({"messages": []}, "messages: it is empty"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"mcp_servers": [{"url": IMAGE}]}, "mcp_servers"), ({"container": "x"}, "container"),
        ({"messages": [USER, {"role": "assistant", "content": "He"}]}, "going on with it is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "url", "url": IMAGE}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "tool_use", "id": "a", "name": "look", "input": {}}]}]},
         "tool_use blocks can't be in a turn of the role 'user'"),
        *(({"messages": [{"role": "user", "content": [block]}]}, "only assistant") for block in (
            {"type": "thinking", "thinking": "a"}, {"type": "redacted_thinking"})),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
                       USER]}, "only user"),
        ({"stop_sequences": ["a"] * 17}, "at most 16"), ({"unheard_of": 1}, "unheard_of"))],
    EMBEDDINGS: [
        ({"input": []}, "input", "", ""), ({"input": [[]]}, "input[0]", "", ""),
        ({"input": [10**9]}, None, "", ""), ({"input": "1" * 4_000_000}, "input", "", ""),
        ({"input": ["a"] * 3000}, "input", "", ""), ({"dimensions": 65}, "dimensions", "", ""),
        ({"dimensions": 0}, "dimensions", "", ""), ({"encoding_format": "hex"}, "encoding_format", "", ""),
        ({"pooling": "cls"}, "pooling", "", ""), ({"kv": "nothing-like-it"}, "kv", "", "")],
    TOKENIZE: [
        ({}, "prompt", "", ""), ({"prompt": "a", "messages": [USER]}, "prompt", "", ""),
        ({"prompt": 5}, "prompt", "", ""), ({"prompt": "1" * 4_000_000}, "prompt", "", ""),
        ({"prompt": "a", "tools": [TOOL]}, "tools", "", ""),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", "", "")],
    DETOKENIZE: [
        ({}, "tokens", "", ""), ({"tokens": []}, "tokens", "", ""), ({"tokens": [10**9]}, None, "", ""),
        ({"tokens": [-1]}, None, "", ""), ({"tokens": ["a"]}, "tokens[0]", "", ""),
        ({"tokens": [5] * 300_000}, "tokens", "", "")],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("path", "change", "param", "code", "said"), [
    (path, *case) for path, cases in REFUSED.items() for case in cases])
def test_what_cant_be(strict, path, change, param, code, said):
    refused(strict.post(path, {**BODIES[path], **change}), param, code, said)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("prompt", "said"), [
    ([], "empty"), (["a", 3], "prompt"), ([3, "a"], "prompt"), ([[3], "a"], "prompt"), ({"a": 1}, "prompt"),
    ([True], "prompt"), ([-1], "doesn't know"), ([10**9], "doesn't know"), ([2**70], "doesn't know"),
    ([[5], [-1]], "doesn't know"), ([[]], "empty"), (3, "prompt"), (None, "prompt"), ([1.5], "prompt"),
])
@pytest.mark.parametrize("echo", [True, False])
def test_prompts_that_cant_be(shared, prompt, said, echo):
    answer = shared.post(TEXT, {"prompt": prompt, "echo": echo})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert said in answer.json()["error"]["message"]


OPENAI = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [],
          "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}, "suffix": None,
          "presence_penalty": 0, "frequency_penalty": 0.0, "n": None, "stop": None, "max_tokens": 2,
          "seed": -5, "parallel_tool_calls": True, "stream_options": {"include_obfuscation": False}}
EARLIER = {"role": "assistant", "content": "x", "refusal": None, "audio": None, "function_call": None,
           "tool_calls": [], "annotations": None, "name": None}


@pytest.mark.parametrize(("path", "harmless"), [
    (CHAT, OPENAI), (TEXT, {**OPENAI, "best_of": 2, "n": 2}),
    (CHAT, {"messages": [USER, EARLIER, USER], "reasoning_effort": "none", "verbosity": "medium",
            "tool_choice": "none", "audio": None}),
    (RESPONSES, {
        "store": True, "user": "me", "service_tier": "auto", "truncation": "disabled", "background": False,
        "reasoning": {"summary": "auto", "effort": None}, "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}},
        "previous_response_id": None, "stream_options": {"include_obfuscation": False}}),
    (MESSAGES, {
        "metadata": {"user_id": "me"}, "service_tier": "auto", "stop_sequences": [], "top_k": 5, "tools": [],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "mcp_servers": []}),
])
def test_what_changes_nothing_is_taken(shared, path, harmless):
    assert shared.post(path, {**BODIES[path], **harmless}).status_code == 200


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NUMBERS)
def test_extreme_numbers_are_obeyed_or_refused(shared, name):
    statuses = set()
    for value in [*NUMBERS[name], *(-value for value in NUMBERS[name])]:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 2, "temperature": 1, name: value}
        answer = shared.post_content(TEXT, json.dumps(body))
        assert answer.status_code in (200, 400), (value, answer.text)
        statuses.add(answer.status_code)
    assert statuses == {200, 400}


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
                "min_p": 5e-324, "repetition_penalty": 0.01, "top_k": 2**31 - 1, "seed": 2**63 - 1,
                "logprobs": 20, "echo": True}
        assert shared.post(TEXT, body).status_code == 200
