"""Bodies whose parsing alone would take long."""

import json

import pytest

from quantkit.serve.body import MAX_CONTAINERS, check_structure
from quantkit.serve.errors import ApiError

PATH = "/v1/completions"
KIND = {"content-type": "application/json"}


@pytest.mark.parametrize("content", [
    b'{"model": "tiny", "prompt": [' + b"[1]," * 10**6 + b"[1]]}",
    b'{"model": "tiny", "prompt": "a", "metadata": [' + b'{"a":{}},' * 400_000 + b"{}]}",
    b'{"model": "tiny", "messages": [' + b'{"role":"user","content":""},' * 140_000 + b"{}]}",
    b"[" * 4_000_000, b'"' + b"[" * 20_000 + b'"' + b"[" * 20_000,
])
def test_more_lists_and_objects_than_anybody_needs_are_not_parsed(shared, content):
    with shared.http as client:
        answer = client.post(PATH, content=content, headers=KIND)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


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
