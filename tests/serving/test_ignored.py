"""Keys, tools and hints that the server doesn't do are ignored and named."""

import json

import pytest

from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling
from quantkit.serving.anthropic.request import CountRequest, MessagesRequest
from quantkit.serving.conversation import ThinkingHint, thinking_options
from quantkit.serving.ignored import MAX_HEADER, MAX_TOLD, Ignored, IgnoredLog, header

from .conftest import APIS, CHAT, MESSAGES, RESPONSES, TEXT, asked

USER = [{"role": "user", "content": "hi"}]
TEMPLATE = "the chat template has no such setting"
CODEX = {
    "model": "gpt-5-codex", "instructions": "You are a coding agent.", "max_output_tokens": 4,
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    "client_metadata": {"x": "1"}, "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"}, "parallel_tool_calls": False, "tool_choice": "auto",
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {
            "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}},
        {"type": "web_search", "external_web_access": False}, {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {
            "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "namespace", "name": "mcp", "description": "d", "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]}]}
CLAUDE = {
    "model": "claude-sonnet-4-5", "max_tokens": 4, "messages": USER,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
               {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}, "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [{"name": name, "description": "d" * 20_000, "input_schema": {"type": "object"},
               "defer_loading": True, "input_examples": [], "eager_input_streaming": True}
              for name in ("Bash", "Read")] + [{"type": "bash_20250124", "name": "bash"}]}


def ignored(answer):
    assert answer.status_code == 200, answer.text
    return set(answer.headers.get("quantkit-ignored", "").split(", ")) - {""}


@pytest.mark.parametrize("stream", [False, True])
def test_what_codex_sends_is_answered(shared, prepared, stream):
    answer = shared.post(RESPONSES, {**CODEX, "stream": stream})
    assert ignored(answer) == {"client_metadata", "text.verbosity", "tools[1] (web_search)",
                               "tools[2] (local_shell)", f"reasoning.effort ({TEMPLATE})"}
    assert [tool.name for tool in prepared[-1][1]] == ["shell", "apply_patch", "mcp__f"]


def test_what_claude_code_sends_is_answered(shared, prepared):
    names = {"context_management", "tools[*].defer_loading", "tools[2] (bash_20250124)",
             f"output_config.effort ({TEMPLATE})", "system[0] (x-anthropic-billing-header)"}
    assert ignored(shared.post(f"{MESSAGES}?beta=true", CLAUDE)) == names
    assert prepared[-1][0][0] == {"role": "system", "content": "Be brief."}
    assert len(prepared[-1][1][0].description) == 20_000
    assert ignored(shared.post(f"{MESSAGES}/count_tokens?beta=true", CLAUDE)) == names
    assert prepared[-1][0] == prepared[-2][0]


def test_tokens_are_counted_of_all_that_is_answered():
    assert MessagesRequest.model_fields.keys() - CountRequest.model_fields.keys() <= CountRequest.ignored
    assert MessagesRequest.ignored <= CountRequest.ignored


@pytest.mark.parametrize("path", APIS)
def test_an_answer_longer_than_the_context_is_cut(shared, loaded, path):
    *_, limit = body = asked(path, "a")
    room = loaded.config.max_position_embeddings - len(
        loaded.tokenizer.encode("a") if path == TEXT else loaded.tokenizer.chat(asked(CHAT, "a")["messages"]))
    with shared.http as client:  # the first event says enough
        body |= {"model": "tiny", "stream": True}
        with client.stream("POST", path, json={**body, limit: 10**6}) as answer:
            assert ignored(answer) == {f"{limit} (cut to {room})"}
        if path in (CHAT, TEXT):
            del body[limit]
            with client.stream("POST", path, json={**body, "n_predict": 10**6}) as answer:
                assert ignored(answer) == {f"n_predict (cut to {room})"}
        with client.stream("POST", path, json={**body, limit: room}) as answer:
            assert ignored(answer) == set()
        with client.stream("POST", path, json={**body, limit: -1}) as answer:
            assert ignored(answer) == set()


def test_a_type_of_null_is_the_default_one(shared, prepared):
    tool = {"type": None, "name": "Bash", "input_schema": {"type": "object"}}
    assert ignored(shared.post(MESSAGES, {"max_tokens": 1, "messages": USER, "tools": [tool]})) == set()
    assert [tool.name for tool in prepared[-1][1]] == ["Bash"]
    body = {"max_output_tokens": 1, "input": [{"type": None, **USER[0]}]}
    assert ignored(shared.post(RESPONSES, body)) == set()


def test_keys_of_other_servers(shared):
    answer = shared.post(CHAT, {
        "messages": [{"role": "user", "content": "hi", "reasoning_details": []},
                     {"role": "assistant", "content": "x", "reasoning": "why", "refusal": "no"}, *USER],
        "options": {"num_ctx": 4096}, "num_ctx": 4096, "keep_alive": "5m", "cache_prompt": True,
        "verbosity": "low", "top_k": -1, "n_predict": 2, "repeat_penalty": 1.1, "prediction": {},
        "tools": [{"type": "web_search"}], "cache_control": None})
    assert answer.json()["usage"]["completion_tokens"] <= 2
    assert ignored(answer) == {"options", "num_ctx", "keep_alive", "verbosity", "prediction",
                               "tools[0] (web_search)", "messages[0].reasoning_details",
                               "messages[1].refusal"}


@pytest.mark.parametrize(("hint", "options", "names"), [
    ({"reasoning_effort": "none"}, {"enable_thinking": False}, set()),
    ({"reasoning_effort": "minimal"}, {"enable_thinking": False}, set()),
    ({"reasoning_effort": "high"}, {}, {f"reasoning_effort ({TEMPLATE})"}),
    ({"enable_thinking": True}, {"enable_thinking": True}, set()),
    ({"think": False}, {"enable_thinking": False}, set()),
    ({"think": "high"}, {}, {f"think ({TEMPLATE})"}),
    ({"think": False, "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}, set()),
])
def test_reasoning_is_switched_where_the_template_can(shared, prepared, monkeypatch, hint, options, names):
    monkeypatch.setattr(type(shared.loaded.tokenizer), "template_text", "{% if enable_thinking %}<think>")
    assert ignored(shared.post(CHAT, {"messages": USER, "max_tokens": 1, **hint})) == names
    assert prepared[-1][2] == options


@pytest.mark.parametrize("template", [
    "Is it thinking? {{ 'It is thinking.' }}",
    "{% if message.thinking %}{{ message['thinking'] }}{% endif %}",
    '{{ "a \\" thinking" }}', "{# enable_thinking #}"])
def test_a_template_that_has_only_the_word_has_no_switch(template):
    assert thinking_options(template, False, [ThinkingHint("think", True, wish=True)]) == {}
    assert thinking_options(template + "{%- if not thinking is defined %}{% endif -%}", False, [
        ThinkingHint("think", True)]) == {"thinking": True}


def test_how_much_a_model_reasons(shared, prepared, monkeypatch):
    monkeypatch.setattr(type(shared.loaded.tokenizer), "template_text", "{{ reasoning_effort }}")
    for path, body in ((RESPONSES, {"input": "a", "reasoning": {"effort": "high"}}),
                       (MESSAGES, {"messages": USER, "max_tokens": 1, "output_config": {"effort": "high"}})):
        assert ignored(shared.post(path, body)) == set()
        assert prepared[-1][2] == {"reasoning_effort": "high"}


def test_what_a_model_without_reasoning_is_told_about_it(shared):
    """Not to think is what it does anyway."""
    for hint, names in (({"think": False}, set()), ({"reasoning_effort": "none"}, set()),
                        ({"enable_thinking": True}, {f"enable_thinking ({TEMPLATE})"})):
        assert ignored(shared.post(CHAT, {"messages": USER, "max_tokens": 1, **hint})) == names
    for kind, names in (("adaptive", set()), ("enabled", {f"thinking ({TEMPLATE})"}), ("disabled", set())):
        assert ignored(shared.post(MESSAGES, {"messages": USER, "max_tokens": 1,
                                              "thinking": {"type": kind}})) == names


def test_one_model_answers_to_any_name(shared, strict):
    for path, body in ((CHAT, {"messages": USER, "max_tokens": 1}), ("/v1/embeddings", {"input": "a"}),
                       ("/tokenize", {"prompt": "a"})):
        answer = shared.post(path, {"model": "gpt-5", **body})
        assert answer.status_code == 200 and answer.json().get("model", "tiny") == "tiny"
        assert strict.post(path, {"model": "gpt-5", **body}).status_code == 404
        if path == "/tokenize":  # which needs none
            assert strict.post_content(path, json.dumps(body)).status_code == 200
    with shared.http as client:
        assert client.get("/v1/models/gpt-5").status_code == 404 and client.head("/").status_code == 200


@pytest.mark.parametrize("key", ["a\r\nSet-Cookie: b", "a,b", "\u2028\ud800é", "", "x" * 10_000])
def test_no_key_breaks_the_header(shared, key):
    body = json.dumps({"model": "tiny", "messages": USER, "max_tokens": 1, key: 1,
                       "tools": [{"type": key, "name": key}]})
    answer = shared.post_content(CHAT, body)
    value = answer.headers["quantkit-ignored"]
    assert answer.status_code == 200 and value.isascii() and value.isprintable() and len(value) < 200
    assert value.count(",") == 1 and "set-cookie" not in answer.headers


def test_the_header_is_bounded(shared):
    answer = shared.post(CHAT, {"messages": [{**USER[0], **{f"key{i}-{j}": 1 for i in range(50)}}
                                             for j in range(100)], "max_tokens": 1})
    value = answer.headers["quantkit-ignored"]
    assert len(value) <= MAX_HEADER and value.endswith(" more")
    assert header(["a" * 600, "b" * 600]) == "a" * 600 + " and 1 more"


def test_paths():
    body = {"a": [{"x": 1}, {"x": 1}, {"y": {"z": [{}]}}], "b": {}}
    ignored_keys = Ignored()
    assert not ignored_keys
    for part in body["a"][:2]:
        ignored_keys.key(part, "x")
    ignored_keys.key(body["a"][2]["y"], "z")
    ignored_keys.key(body, "b")
    ignored_keys.part(body["a"][2]["y"]["z"][0], "mcp")
    ignored_keys.other("n (why, so)")
    assert ignored_keys.names(body) == ["b", "a[*].x", "a[2].y.z", "a[2].y.z[0] (mcp)", "n (why? so)"]


def test_the_log_tells_each_kind_once_for_each_client():
    lines = []
    log = IgnoredLog(lines.append)
    for client in ("claude-cli/2.1 (external)", "codex\r\n/1", "claude-cli/2.1 (external)", ""):
        log.add(client, ["a", "tools[3] (web_search)"])
        log.add(client, ["a", "tools[7] (web_search)"])
    assert lines == [f"ignored in requests of {name}: a, tools[3] (web_search)" for name in (
        "claude-cli/2.1", "codex??/1", "an unnamed client")]
    for number in range(2 * MAX_TOLD):
        log.add(str(number), ["a"])
    assert len(lines) <= MAX_TOLD + 3


def test_a_server_logs_what_it_ignores(live):
    lines = []
    made = live(on_ignored=lines.append)
    for _ in range(2):
        made.post(CHAT, {"messages": USER, "max_tokens": 1, "seeed": 1}, headers={"user-agent": "me/1"})
    assert lines == ["ignored in requests of me/1: seeed"]


def test_token_ids_end_an_answer(shared):
    asked = {"prompt": "the cat", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    tokenizer = shared.loaded.tokenizer
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    ids = generate(shared.loaded, [tokenizer.encode("the cat")], sampling)[0].token_ids
    answer = shared.post("/v1/completions", {**asked, "stop_token_ids": [299, ids[4]]}).json()
    (choice,) = answer["choices"]
    end = ids.index(ids[4])
    assert choice["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == end + 1
    assert choice["text"] == tokenizer.decode(ids[:end])
    assert shared.post("/v1/completions", {**asked, "stop_token_ids": [-1]}).status_code == 400
