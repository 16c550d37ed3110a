"""``/openapi.json`` is true: what it allows is accepted, what it forbids refused, all answers described."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from quantkit.runtime.sampler import MAX_TOKENS
from quantkit.serving.answers import ChatChunk, TextChunk
from quantkit.testing import CHAT_TEMPLATE, tiny_model

CONTEXT = 8192


@pytest.fixture(scope="module")
def described(shared):
    return shared.get("/openapi.json").json()


@pytest.fixture(scope="module", ids=["lenient", "strict"],
                params=[pytest.param([], marks=pytest.mark.slow), ["--strict-requests"]])
def url(tmp_path_factory, request):
    """A server in a process of its own. What a request may say of reasoning, its chat template knows."""
    folder = tiny_model(tmp_path_factory.mktemp("models") / "tiny", dtype="float32",
                        max_position_embeddings=CONTEXT)
    template = folder.parent / "template.jinja"
    template.write_text(CHAT_TEMPLATE + "{% if enable_thinking and reasoning_effort %}{% endif %}")
    command = [sys.executable, "-m", "quantkit.cli.main", "serve-local", str(folder), "--port", "0", "--json",
               "--chat-template", str(template), *request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        yield json.loads(child.stdout.readline())["url"]
        child.terminate()
        assert child.wait(60) == 0


@pytest.mark.parametrize("options", [
    pytest.param(["--phases", "examples,fuzzing,stateful", "--max-examples", "8", "--seed", "1"],
                 id="short"),
    pytest.param(["--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "200"], id="long",
                 marks=pytest.mark.slow),
])
def test_schemathesis_finds_nothing(url, root, tmp_path, options):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install -c constraints.txt schemathesis")
    config = root / "tests" / "serving" / "schemathesis.toml"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run",
               f"{url}/openapi.json", "--no-color", "--mode", "all", "--checks", "all", "--request-timeout",
               "60", "--max-response-time", "60", *options]
    path = os.pathsep.join([str(root / "tests" / "serving"), os.environ["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False,
                          env={**os.environ, "SCHEMATHESIS_HOOKS": "rules", "PYTHONPATH": path})
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generated" in done.stdout and "14 selected / 14 total" in done.stdout


@pytest.mark.parametrize("server", ["shared", "strict"])
def test_the_models_limits_are_in_it(server, request):
    shared = request.getfixturevalue(server)
    described = shared.http.get("/openapi.json").json()
    chat, text = (described["components"]["schemas"][name]["properties"]
                  for name in ("ChatRequest", "CompletionRequest"))
    config = shared.loaded.config
    for field in (chat["max_tokens"], chat["max_completion_tokens"], text["max_tokens"]):
        limits = [option["maximum"] for option in field["anyOf"] if "maximum" in option]
        assert limits == [config.max_position_embeddings - 1 if server == "strict" else MAX_TOKENS]
    if server == "strict":
        assert chat["model"]["enum"] == text["model"]["enum"] == ["tiny"]
    else:  # which answers to any name
        assert "enum" not in chat["model"]
    include = described["components"]["schemas"]["ResponsesRequest"]["properties"]["include"]["anyOf"]
    items = next(option["items"] for option in include if "items" in option)
    assert (items == {"type": "string"}) == (server == "shared"), "others are left out"
    ids = next(option for option in text["prompt"]["anyOf"]
               if option.get("items", {}).get("type") == "integer")
    assert ids["items"]["maximum"] == config.vocab_size - 1 and ids["items"]["minimum"] == 0


@pytest.mark.parametrize("server", ["shared", "strict"])
def test_null_means_the_default_as_described(server, request):
    shared = request.getfixturevalue(server)
    described = shared.http.get("/openapi.json").json()
    for name, path, body in (
            ("ChatRequest", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("CompletionRequest", "/v1/completions", {"prompt": "a"})):
        schema = described["components"]["schemas"][name]
        optional = set(schema["properties"]) - set(schema["required"])
        nulls = dict.fromkeys(optional) | {"unheard_of": None, "max_tokens": 1}
        assert shared.post(path, body | nulls).status_code == 200
        assert schema["additionalProperties"] == ({"type": "null"} if server == "strict" else True)


def test_every_error_has_the_one_shape_and_streams_their_type(described):
    for path, operations in described["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                content = answer["content"]
                if status != "200":
                    error = "AnthropicErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
                    assert content == {
                        "application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
                else:
                    assert ("text/event-stream" in content) == path.endswith(
                        ("completions", "responses", "messages"))
            assert {"200", "400", "403", "405", "408", "500"} <= set(operation["responses"])
    assert "securitySchemes" not in described["components"]


@pytest.mark.parametrize(("path", "asked", "chunk"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, ChatChunk),
    ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True}, TextChunk)])
def test_events_are_what_is_described(shared, described, path, asked, chunk):
    answer = shared.post(path, {**asked, "max_tokens": 3, "stream": True,
                                "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]" and len(events) > 3
    for event in events:
        chunk.model_validate_json(event, strict=True)
    assert chunk.__name__ in described["components"]["schemas"]
    event = described["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    assert chunk.__name__ in json.dumps(event)


def test_a_key_is_described(live):
    made = live(key="sesame-1234")
    described = made.get("/openapi.json", headers={"authorization": "Bearer sesame-1234"}).json()
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert described["security"] == [{"key": []},
        {"header": []}] and described["paths"]["/health"]["get"]["security"] == []
    assert "401" in described["paths"]["/v1/models"]["get"]["responses"]
    assert "401" not in described["paths"]["/health"]["get"]["responses"]
