"""Which replica gets a request."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from quantkit.serving.replicas.balance import PrefixBalancer

TWO = ("a", "b")


def send(balancer, blocks, replicas=TWO, request=None):
    """The replica that a request gets; without a name it is over at once."""
    replica = balancer.choose(request or "short", blocks, replicas)
    if request is None:
        balancer.ended("short")
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
    chosen = [send(balancer, [1, 2, 3], request=f"r{number}") for number in range(8)]
    first, other = chosen[0], "b" if chosen[0] == "a" else "a"
    assert chosen[:3] == [first] * 3 and chosen[3] == other
    assert Counter(chosen) == {first: 4, other: 4}, "from then on both have read it"


def test_a_beginning_that_is_little_of_a_prompt_doesn_t_decide(balancer):
    send(balancer, [1], ["a"], request="first")
    assert send(balancer, [1, *range(100, 140)]) == "b"
    send(balancer, [1, 2, 3, 4], ["a"])
    assert send(balancer, [1, 2, 3, 4, *range(200, 230)]) == "a"


def test_what_was_never_read_goes_to_the_least_busy(balancer):
    for number in range(3):
        send(balancer, (), ["a"], request=f"r{number}")
    assert [send(balancer, ()) for _ in range(3)] == ["b"] * 3
    for number in range(3):
        balancer.ended(f"r{number}")
    assert {send(balancer, ()) for _ in range(2)} == {"a", "b"}, "equally busy ones take turns"


def test_a_burst_is_shared_out_before_any_of_it_is_sent(balancer):
    chosen = [send(balancer, (), request=f"r{number}") for number in range(6)]
    assert Counter(chosen) == {"a": 3, "b": 3}


def test_a_request_counts_once_and_until_it_ends(balancer):
    for _ in range(5):  # it couldn't be sent and is chosen for again
        send(balancer, (), ["a"], request="again")
    assert [send(balancer, (), request=name) for name in ("second", "third")] == ["b", "a"]
    for _ in range(3):  # more than once, and requests that nobody has chosen for
        balancer.ended("again")
        balancer.ended("unknown")
    assert [send(balancer, (), request=name) for name in "xyz"][:2] in (["a", "b"], ["b", "a"])


def test_a_request_counts_where_it_has_arrived(balancer):
    send(balancer, (), ["a"], request="moved")
    balancer.sent("moved", "b")
    balancer.sent("over", "b")
    assert send(balancer, (), request="next") == "a"
    balancer.ended("moved")
    assert send(balancer, ()) == "b"


def test_a_replica_that_is_gone_is_forgotten(balancer):
    assert send(balancer, [1, 2, 3], ["a"], request="first") == "a"
    balancer.keep(["b", "c"])
    assert send(balancer, [1, 2, 3], ["b", "c"]) in ("b", "c")
    balancer.ended("first")
    assert {send(balancer, (), ["a", "b"], request=name) for name in "xy"} == {"a", "b"}, \
        "a count never gets below none"


def test_the_ends_of_texts_are_forgotten_first():
    balancer = PrefixBalancer(slack=2, capacity=4)
    send(balancer, [1, 2, 3], ["a"])
    send(balancer, [7, 8], ["b"])  # no place for 3
    assert send(balancer, [1, 2]) == "a"
    send(balancer, [20, 21, 22, 23], ["b"])
    send(balancer, (), ["a"], request="running")
    assert send(balancer, [1, 2]) == "b", "what wasn't asked for is forgotten"


def test_threads_may_share_it():
    balancer = PrefixBalancer(slack=0, capacity=64)

    def work(seed):
        for i in range(300):
            send(balancer, [seed, i, i + 1], ("a", "b", "c"), request=f"{seed}-{i}")
            balancer.keep(("a", "b", "c"))
            balancer.ended(f"{seed}-{i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(send(balancer, (), ("a", "b", "c"), request=name) for name in "xyz") == [
        "a", "b", "c"], "all are idle again"
