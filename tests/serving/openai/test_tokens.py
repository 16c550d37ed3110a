"""``/tokenize`` and ``/detokenize``: what they say is what the tokenizer says."""

import pytest


def test_a_text(shared, loaded):
    tokenizer = loaded.tokenizer
    answer = shared.post("/tokenize", {"prompt": "the cat", "return_token_strs": True}).json()
    ids = tokenizer.encode("the cat")
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == loaded.config.max_position_embeddings
    assert answer["token_strs"][0] == "<s>" and "".join(answer["token_strs"][1:]) == "the cat"
    assert shared.post("/detokenize", {"tokens": ids}).json() == {"prompt": "<s>the cat"}
    plain = shared.post("/tokenize", {"prompt": "the cat", "add_special_tokens": False}).json()
    assert plain["tokens"] == ids[1:] and plain["token_strs"] is None


def test_a_conversation_has_the_tokens_that_its_answer_has(shared, loaded):
    messages = [{"role": "user", "content": "the cat"}]
    answer = shared.post("/tokenize", {"messages": messages}).json()
    assert answer["tokens"] == loaded.tokenizer.chat(messages)
    chat = shared.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert answer["count"] == chat["usage"]["prompt_tokens"]


def test_the_model_may_be_left_out(strict):
    with strict.http as client:
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert client.post("/tokenize", json={"prompt": "a", "model": "other"}).status_code == 404


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"prompt": "1" * 4_000_000}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": []}, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, None),
    ("/detokenize", {"tokens": [-1]}, None), ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [5] * 300_000}, "tokens"),
])
def test_what_cant_be_is_refused(strict, path, body, param):
    answer = strict.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
