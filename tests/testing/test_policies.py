"""Broken KV policies, each by one fault, and what check_policy says of it."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from pydantic import Field

from quantkit.kv.base import KVPolicy
from quantkit.kv.policies.score_policy import ScorePolicy
from quantkit.plugins.manager import registry
from quantkit.support.errors import PluginError
from quantkit.testing import check_policy


class Norms(ScorePolicy):
    """A correct one: the keys of least norm stay (https://arxiv.org/abs/2406.11430)."""

    name: ClassVar[str] = "zoo"

    def score(self, view):
        return -view.keys().float().norm(dim=-1)


def scored(score, **fields):
    """A policy with this score."""
    own = {"__module__": __name__, "score": lambda self, view: score(view)}
    return type("Zoo", (Norms,), own | fields)


class Keeps(KVPolicy):
    """Chooses slots by a function; acts at the prompt's end."""

    name: ClassVar[str] = "zoo"
    on_prefill: ClassVar = "end"
    budget: int = Field(default=64, ge=1)


def keeping(keep, **fields):
    return type("Zoo", (Keeps,), {"__module__": __name__, "keep": lambda self, view: keep(view), **fields})


def first(view, count=64):
    return [torch.arange(min(count, length)) for length in view.lengths]


def test_the_correct_ones_pass():
    check_policy(Norms)
    check_policy(keeping(first))


CALLS = itertools.count(1)


def remember(view):
    return view.keys().float().norm(dim=-1) * (1 + next(CALLS))


def write(view):
    return view.keys().mul_(2).norm(dim=-1)


ZOO = [
    ("no policy at all", dict, "is no KV policy"),
    ("a class without a name", scored(lambda view: view.keys().norm(dim=-1), name=""), "has no name"),
    ("it never acts", keeping(first, on_prefill=None), "it never acts"),
    ("an unknown moment", keeping(first, on_prefill="start"), "on_prefill is 'start'"),
    ("unknown statistics", scored(lambda view: view.attention_received(), tracks="attention"),
     "tracks is 'attention'"),
    ("tracked without a window of queries", scored(lambda view: view.attention_received(),
                                                   tracks="attention_sum"), "query_window .*, which is 0"),
    ("a granularity that is no page", keeping(first, release_granularity=10), "release_granularity is 10"),
    ("an interval of 0", keeping(first, decode_interval=property(lambda self: 0)), "decode_interval is 0"),
    ("an option without a default", type("Zoo", (Norms,), {
        "__module__": __name__, "__annotations__": {"share": float}}), "can't be made"),
    ("attention that it doesn't declare", scored(lambda view: view.window_attention()),
     r"asks for view\.window_attention"),
    ("statistics that it doesn't declare", scored(lambda view: view.attention_received()),
     r"asks for view\.attention_received"),
    ("queries that it doesn't declare", scored(lambda view: view.future_queries(8)[0].norm(dim=-1)),
     r"asks for view\.future_queries"),
    ("scores of another shape", scored(lambda view: view.keys().norm(dim=-1)[0]),
     r"score\(\) returned torch"),
    ("scores that are integers", scored(lambda view: view.positions()), r"score\(\) returned torch.int32"),
    ("scores that are a list", scored(lambda view: view.keys().norm(dim=-1).tolist()), "returned a list"),
    ("NaN where keys are zeros", scored(lambda view: 1 / view.keys().norm(dim=-1) * view.keys().sum(-1)),
     r"score\(\) returned NaN"),
    ("it writes to the keys", scored(write), r"score\(\) writes to keys"),
    ("chance", scored(lambda view: torch.rand(len(view.lengths), max(view.lengths))),
     "global random generator"),
    ("memory of earlier calls", scored(remember), "another result the second time"),
    ("it fails on short texts", scored(lambda view: view.keys().norm(dim=-1).unfold(-1, 5, 1).mean(-1)),
     "RuntimeError"),
    ("a slot beyond the length",
     keeping(lambda view: [torch.arange(length + 1) for length in view.lengths]), "which holds 1"),
    ("negative slots", keeping(lambda view: [torch.tensor([-1, 0]) for _ in view.lengths]),
     "slot -1 of head 0"),
    ("slots that fall", keeping(lambda view: [slots.flip(0) for slots in first(view)]), "that don't rise"),
    ("a slot twice", keeping(lambda view: [torch.zeros(2, dtype=torch.int64) for _ in view.lengths]),
     "that don't rise"),
    ("one head too few", keeping(lambda view: first(view)[1:]), "slots of 2 heads; there are 3"),
    ("a mask instead of slots", keeping(lambda view: torch.ones(len(view.lengths), max(view.lengths)).bool()),
     "torch.bool"),
    ("int32", keeping(lambda view: [slots.int() for slots in first(view)]), "torch.int32"),
    ("lists instead of tensors", keeping(lambda view: [slots.tolist() for slots in first(view)]), "a list"),
    ("nothing stays", keeping(lambda view: [slots[:0] for slots in first(view)]), "no slot for head 0"),
    ("heads that keep different numbers", keeping(
        lambda view: [slots[:max(1, 5 - head)] for head, slots in enumerate(first(view))]),
     "heads keep equally many"),
    ("it drops though it says it never does", keeping(lambda view: first(view, 1), keeps_all=True),
     "keeps_all says that nothing is ever dropped"),
    ("more than its budget", keeping(lambda view: first(view, 280)), "its budget allows"),
    ("a number that depends on what was dropped",
     keeping(lambda view: first(view, 8 if view.seen > 500 else 16)), r"depends on view\.seen"),
]


@pytest.mark.parametrize(("fault", "kind", "words"), ZOO, ids=[row[0] for row in ZOO])
def test_a_broken_policy_is_caught(fault, kind, words):
    with pytest.raises(PluginError, match=words):
        check_policy(kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(registry("kv_policies")))
def test_registered_policies(name):
    check_policy(registry("kv_policies").get(name))


@pytest.mark.parametrize("name", ["snapkv", "window", "h2o"])
def test_with_a_budget_in_tokens(name):
    check_policy(registry("kv_policies").get(name), budget=100)
