"""Which replica gets a request."""

from __future__ import annotations

from collections import Counter

import pytest

from quantkit.serving.replicas.balance import PrefixBalancer

TWO = ("a", "b")


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
