"""Bodies whose parsing alone would take long."""

import json

import pytest

from quantkit.serving.body import MAX_CONTAINERS, check_structure
from quantkit.serving.errors import ApiError
from quantkit.serving.schema import MAX_JSON_VALUES, check_json

PATH = "/v1/completions"


@pytest.mark.parametrize("content", [
    b'{"model": "tiny", "prompt": [' + b"[1]," * 10**6 + b"[1]]}",
    b'{"model": "tiny", "prompt": "a", "metadata": [' + b'{"a":{}},' * 400_000 + b"{}]}",
    b'{"model": "tiny", "messages": [' + b'{"role":"user","content":""},' * 140_000 + b"{}]}",
    b"[" * 4_000_000, b'"' + b"[" * 20_000 + b'"' + b"[" * 20_000,
])
def test_more_lists_and_objects_than_anybody_needs_are_not_parsed(shared, content):
    answer = shared.post_content(PATH, content)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/embeddings"])
@pytest.mark.parametrize(("encoding", "named"), [
    ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-16", "UTF-16"), ("utf-32-le", "UTF-32"),
    ("utf-32-be", "UTF-32"), ("utf-32", "UTF-32"), ("utf-8-sig", "byte order mark"), ("latin-1", "not UTF-8"),
])
def test_only_utf_8_is_parsed(shared, monkeypatch, path, encoding, named):
    def parse(*args, **options):
        raise AssertionError("it was parsed")

    monkeypatch.setattr(json, "loads", parse)
    answer = shared.post_content(path, '{"model": "tiny", "prompt": "\xe9"}'.encode(encoding))
    monkeypatch.undo()
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_half_of_a_surrogate_pair_is_not_utf_8(shared):
    answer = shared.post_content(PATH, b'{"model": "tiny", "prompt": "\xed\xa0\x80"}')
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "the body is not UTF-8"


@pytest.mark.parametrize("text", ["[{" * 10**6, '"[' * 10**5, '\\"[' * 10**5, "\\[" * 10**5 + "\\"])
def test_brackets_in_a_text_count_for_nothing(shared, text):
    check_structure(json.dumps({"prompt": text, "stop": ["["]}).encode())
    answer = shared.post(PATH, {"prompt": text[:2000], "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize("body", [b"", b'"', b'"\\', b'"' * 4_000_000, b'\\"' * 2_000_000,
                                  b'"\\' * 2_000_000])
def test_text_that_never_ends_takes_no_longer(body):
    check_structure(body + b"[" * 10)


def test_as_many_as_are_allowed():
    check_structure(b"[" * MAX_CONTAINERS)
    with pytest.raises(ApiError):
        check_structure(b"[" * (MAX_CONTAINERS + 1))


MANY = "[" + ",".join(["[]"] * 16_000) + "]"
"""As JSON in a text it has fewer than are allowed; twice it has more."""


def called(arguments):
    return {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}


def escaped(body):
    return json.dumps(body).replace("[]", r"\u005b]").encode()


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [called(MANY)] * 2}]}),
    ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [called(MANY)]}] * 2}),
    ("/v1/responses", {"input": [
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": MANY}] * 2}),
    (PATH, {"prompt": "a", "guided_json": MANY, "structured_outputs": {"json": MANY}}),
])
@pytest.mark.parametrize("write", [lambda body: json.dumps(body).encode(), escaped])
def test_json_in_texts_counts_together_and_is_not_parsed(shared, monkeypatch, path, body, write):
    def parse(*args, **options):
        raise AssertionError("it was parsed")

    monkeypatch.setattr("quantkit.serving.conversation.parse_object", parse)
    monkeypatch.setattr("quantkit.serving.openai.generation.parse_object", parse)
    answer = shared.post_content(path, write({"model": "tiny", **body}))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json", answer.text
    assert "in texts" in answer.json()["error"]["message"]


def test_many_brackets_in_other_texts_are_read(shared):
    refused = shared.post(PATH, {"prompt": MANY * 2, "max_tokens": 1}).json()["error"]
    assert refused["code"] == "context_length_exceeded", "it is too long, and nothing else"
    answer = shared.post_content(PATH, b'{"prompt": "' + b"[" * 20_000)
    assert answer.json()["error"]["message"] == "the body is not JSON"


class Counted(list):
    """A list that must not be looked into."""

    def __iter__(self):
        raise AssertionError("it was looked into")


def test_an_object_with_too_many_values_is_looked_into_no_further():
    with pytest.raises(ValueError, match="more than"):
        check_json({"enum": Counted([0] * (MAX_JSON_VALUES + 1))})
