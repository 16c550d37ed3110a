"""Keys, tools and hints that the server doesn't do are ignored and named, or refused where it is strict."""


import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
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


@pytest.mark.parametrize(("path", "body", "param"), [
    (RESPONSES, CODEX, "client_metadata"), (MESSAGES, CLAUDE, "context_management"),
    (CHAT, {"messages": USER, "unheard_of": 1}, "unheard_of"),
    (CHAT, {"messages": [{**USER[0], "unheard_of": 1}]}, "messages[0].unheard_of"),
    (CHAT, {"messages": USER, "reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"messages": USER, "tools": [{"type": "web_search"}]}, "tools[0].type"),
])
def test_a_strict_server_refuses_it(live, path, body, param):
    answer = live(strict_requests=True).post(path, body)
    assert answer.status_code == 400
    assert path == MESSAGES or answer.json()["error"]["param"] == param
    assert param.rpartition(".")[2] in answer.json()["error"]["message"]
