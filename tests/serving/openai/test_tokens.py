"""``/tokenize`` and ``/detokenize``: what they say is what the tokenizer says."""



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
