"""Which replica gets a request, and the names of a prompt's blocks: equal as far as two prompts are."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from quantkit.serving.replicas.balance import (
    BLOCK,
    MAX_CHARACTERS,
    WRITING,
    PrefixBalancer,
    prefix_blocks,
)

TWO = ("a", "b")
SYSTEM = {"role": "system", "content": "Answer in one word, whatever is asked. " * 8}
CHAT = "/v1/chat/completions"


def send(balancer, blocks, replicas=TWO, over=True):
    """The replica that a request gets, which may be over at once."""
    replica = balancer.choose(blocks, replicas)
    if over:
        balancer.ended(replica)
    return replica


@pytest.fixture
def balancer():
    return PrefixBalancer(slack=2)


def test_every_turn_of_a_conversation_goes_to_the_replica_that_read_the_last_one(balancer):
    turns = {number: [1000 * number + i for i in range(30)] for number in range(1, 9)}
    first = {number: send(balancer, blocks[:5]) for number, blocks in turns.items()}
    assert Counter(first.values()) == {"a": 4, "b": 4}, "new ones are shared out"
    for length in (9, 17, 30):
        assert {number: send(balancer, blocks[:length]) for number, blocks in turns.items()} == first


def test_the_longest_beginning_decides(balancer):
    send(balancer, [1, 2], ["a"])
    send(balancer, [1, 2, 3, 4], ["b"])
    assert send(balancer, [1, 2, 3, 4, 5]) == "b"
    assert send(balancer, [1, 9], ["a"]) == "a"
    assert send(balancer, [1, 9, 10]) == "a"


def test_a_busy_replica_gets_what_it_has_read_only_up_to_the_slack(balancer):
    chosen = [send(balancer, [1, 2, 3], over=False) for number in range(8)]
    first, other = chosen[0], "b" if chosen[0] == "a" else "a"
    assert chosen[:3] == [first] * 3 and chosen[3] == other
    assert Counter(chosen) == {first: 4, other: 4}, "from then on both have read it"


def test_a_beginning_that_is_little_of_a_prompt_doesn_t_decide(balancer):
    send(balancer, [1], ["a"], over=False)
    assert send(balancer, [1, *range(100, 140)]) == "b"
    send(balancer, [1, 2, 3, 4], ["a"])
    assert send(balancer, [1, 2, 3, 4, *range(200, 230)]) == "a"


def test_what_was_never_read_goes_to_the_least_busy(balancer):
    for _ in range(3):
        send(balancer, (), ["a"], over=False)
    assert [send(balancer, ()) for _ in range(3)] == ["b"] * 3
    for _ in range(3):
        balancer.ended("a")
    assert {send(balancer, ()) for _ in range(2)} == {"a", "b"}, "equally busy ones take turns"


def test_a_replica_that_is_gone_is_forgotten(balancer):
    assert send(balancer, [1, 2, 3], ["a"], over=False) == "a"
    assert send(balancer, [1, 2, 3], ["b", "c"]) in ("b", "c")
    balancer.ended("a")
    assert {send(balancer, (), ["a", "b"], over=False) for _ in range(2)} == {"a", "b"}


def test_the_ends_of_texts_are_forgotten_first():
    balancer = PrefixBalancer(slack=2, capacity=4)
    send(balancer, [1, 2, 3], ["a"])
    send(balancer, [7, 8], ["b"])  # no place for 3
    assert send(balancer, [1, 2]) == "a"
    send(balancer, [20, 21, 22, 23], ["b"])
    send(balancer, (), ["a"], over=False)
    assert send(balancer, [1, 2]) == "b", "what wasn't asked for is forgotten"


def blocks(path=CHAT, **body):
    return prefix_blocks(path, json.dumps(body).encode())


def common(first, second):
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    assert not set(first[length:]) & set(second[length:]), "a block is named by all that stands before it"
    return length


def chat(*texts, **more):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return blocks(model="m", messages=[SYSTEM, *messages], **more)


def test_the_next_turn_begins_with_all_of_the_last_one():
    first = chat("What is the capital of France?" * 4)
    second = chat("What is the capital of France?" * 4, "Paris", "And of Italy?")
    assert len(first) > 5 and common(first, second) == len(first)


def test_conversations_have_their_system_prompt_in_common():
    first, second = chat("The sea is blue. " * 20), chat("A train leaves. " * 20)
    assert 0 < common(first, second) <= len(json.dumps(SYSTEM)) // BLOCK + 1 < len(first)


def test_settings_of_the_answer_and_the_order_of_keys_change_nothing():
    assert chat("Hello" * 40) == chat("Hello" * 40, max_tokens=5, temperature=0.5, stream=True, seed=3)
    messages = [{"role": "user", "content": "Hello" * 40}]
    turned = [{"content": "Hello" * 40, "role": "user"}]
    assert blocks(model="m", messages=messages) == blocks(messages=turned, model="m") != ()


@pytest.mark.parametrize("change", [{"model": "n"}, {"kv": "int8"}, {"cache_salt": "x"},
                                    {"tools": [{"type": "function"}]}])
def test_what_is_cached_apart_has_nothing_in_common(change):
    body = {"model": "m", "messages": [SYSTEM]}
    assert common(blocks(**body), blocks(**{**body, **change})) == 0


def test_tenants_have_nothing_in_common():
    body = json.dumps({"model": "m", "messages": [SYSTEM]}).encode()
    assert common(prefix_blocks(CHAT, body, b"one"), prefix_blocks(CHAT, body, b"other")) == 0
    assert prefix_blocks(CHAT, body, b"one") == prefix_blocks(CHAT, body, b"one") != ()


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/messages", {"system": "Be brief. " * 20, "messages": []}),
    ("/v1/responses", {"instructions": "Be brief. " * 20, "input": "Hello"}),
    ("/v1/responses", {"input": "Hello " * 40}), ("/v1/completions", {"prompt": "Hello " * 40}),
    ("/v1/completions", {"prompt": list(range(1000, 1100))}),
])
def test_every_api_s_prompts_have_names(path, body):
    assert path in WRITING and len(blocks(path, model="m", **body)) >= 2


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"' + b"a" * 500 + b'"', b"\xff" * 500, b"[" * 100_000])
def test_what_is_no_prompt_has_none(body):
    assert prefix_blocks(CHAT, body) == ()


def test_a_body_of_too_many_lists_has_none_wherever_they_are():
    for depth in range(500, 3000, 50):
        lists = b"[" * depth + b"]" * depth
        for body in (b'{"messages": [' + lists + b"]}", b'{"tools": ' + lists + b"}"):
            assert isinstance(prefix_blocks(CHAT, body), tuple)


def test_only_what_takes_up_prefixes_has_names():
    assert blocks("/v1/embeddings", model="m", input="Hello " * 40) == ()
    assert blocks("/tokenize", model="m", prompt="Hello " * 40) == ()


def test_a_long_prompt_is_named_by_its_beginning():
    long = blocks("/v1/completions", model="m", prompt="a" * (2 * MAX_CHARACTERS))
    assert len(long) == MAX_CHARACTERS // BLOCK
