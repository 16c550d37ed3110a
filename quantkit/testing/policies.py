"""The contract of KV policies: ``quantkit.kv.base``, ``KVPolicy``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from pydantic import ValidationError

from quantkit.kv.base import PAGE, KVPolicy, PolicyView
from quantkit.kv.checked import checked_scores, checked_slots, policy_fault
from quantkit.kv.policies.score_policy import ScorePolicy
from quantkit.kv.spec import KVSpec
from quantkit.support.errors import PluginError
from quantkit.testing.contract import Contract, named_class
from quantkit.testing.purity import pure, registered
from quantkit.testing.running import PROMPT, check_setting

HEADS, GROUP, DIM = 3, 2, 32
LENGTHS = (1, 3, PAGE - 1, PAGE, PAGE + 1, 130, 300)


def check_policy(kind: type[KVPolicy], **options: Any) -> None:
    """Let a policy choose among ordinary and awkward slots, and run a tiny model with it.

    Checked are what its class declares, what ``keep`` and ``score`` return for many lengths and for slots
    that are all alike, that it asks only for what it declares, writes to nothing, gives the same twice, that
    the number of slots that stay doesn't depend on how many were dropped before, that its budget is obeyed
    and memory given back, and that a sequence's logits are the same alone and beside another.

    Args:
        kind: the class that is registered.
        options: of the policy; a ``budget`` without a default is half of the prompt, or 128 tokens.

    Raises:
        PluginError: a promise is broken; the slots are named.
    """
    name = named_class(kind, KVPolicy, "KV policy")
    contract = Contract(f"KV policy {name!r}", "quantkit.kv.base")
    policy = _made(kind, options, contract)
    fault = policy_fault(policy)
    contract.must(fault is None, fault or "")
    for case in _cases(policy):
        _check_case(policy, case, contract.at(case.name))
    chosen = dict(options)
    if "budget" in kind.model_fields:
        chosen["budget"] = policy.model_dump()["budget"]
    limit = _limit(policy, PROMPT)
    with registered("kv_policies", name, kind):
        for codec in ("none", "int4"):
            here = contract.at(f"with {codec}")
            run = check_setting(KVSpec(policy=name, options=chosen, codec=codec), DIM, here)
            slots = max(map(max, run.slots))
            bounded = limit is not None and policy.uniform_budget and policy.visible is None
            here.must(not bounded or limit is None or slots <= limit,
                      f"a head holds {slots} slots after a prompt of {PROMPT} tokens and an answer, its "
                      f"budget and its slack allow {limit}")


def _made(kind: type[KVPolicy], options: dict[str, Any], contract: Contract) -> KVPolicy:
    field = kind.model_fields.get("budget")
    candidates: Sequence[dict[str, Any]] = (
        ({"budget": 0.5}, {"budget": 128}) if field is not None and field.is_required()
        and "budget" not in options else ({},))
    for extra in candidates:
        try:
            return kind.model_validate(extra | options)
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise contract.error(f"it can't be made with {options or 'its defaults'}: {reason}",
                         "give an option a default, or give it to check_policy")


@dataclass(frozen=True)
class _Case:
    """Slots that a policy chooses among."""

    name: str
    view: PolicyView
    tensors: dict[str, torch.Tensor]


def _cases(policy: KVPolicy) -> list[_Case]:
    cases = []
    for length in LENGTHS:
        cases.append(_case(policy, f"{length} slots", (length,) * HEADS, "random"))
    cases.append(_case(policy, "130 slots that are all alike", (130,) * HEADS, "alike"))
    cases.append(_case(policy, "130 slots of zeros", (130,) * HEADS, "zeros"))
    if not policy.uniform_budget:
        cases.append(_case(policy, "heads of 130, 64 and 7 slots", (130, 64, 7), "random"))
    return cases


def _case(policy: KVPolicy, name: str, lengths: tuple[int, ...], content: str) -> _Case:
    longest = max(lengths)
    random = torch.Generator().manual_seed(longest)

    def made(*shape: int) -> torch.Tensor:
        if content == "random":
            return torch.randn(*shape, generator=random)
        return torch.full(shape, 0.5 if content == "alike" else 0.0)

    ends = torch.tensor(lengths)[:, None]
    at = torch.arange(longest, dtype=torch.int32).expand(len(lengths), -1)
    beyond = at >= ends
    tensors = {"positions": at.masked_fill(beyond, -1).contiguous(), "keys": made(len(lengths), longest, DIM),
               "values": made(len(lengths), longest, DIM),
               "window_attention": made(len(lengths), longest).abs().masked_fill(beyond, 0),
               "attention_received": made(len(lengths), longest).abs().masked_fill(beyond, 0)}
    queries = len(lengths) * GROUP
    mean, covariance = made(queries, DIM), torch.eye(DIM).expand(queries, -1, -1)

    def undeclared(what: str, declare: str) -> Callable[..., NoReturn]:
        def refuse(*_: Any) -> NoReturn:
            raise PluginError(f"KV policy {policy.name!r} asks for view.{what}",
                              why="it doesn't declare that", next=f"declare it: {declare}")

        return refuse

    scores = tensors["window_attention"], tensors["attention_received"]
    view = PolicyView(
        layer=0, layers=2, lengths=lengths, seen=longest, prompt=longest,
        positions=lambda: tensors["positions"],
        keys=lambda: tensors["keys"], values=lambda: tensors["values"],
        window_attention=(lambda: scores[0]) if policy.query_window else undeclared(
            "window_attention", "a property query_window that returns the number of queries"),
        attention_received=(lambda: scores[1]) if policy.tracks in ("attention_sum", "attention_max")
        else undeclared("attention_received", 'tracks: ClassVar = "attention_sum" (or "attention_max")'),
        future_queries=(lambda steps: (mean, covariance)) if policy.tracks == "query_moments" else undeclared(
            "future_queries", 'tracks: ClassVar = "query_moments"'))
    return _Case(name, view, tensors)


def _check_case(policy: KVPolicy, case: _Case, contract: Contract) -> None:
    view = case.view
    if isinstance(policy, ScorePolicy):
        scores = pure(contract, "score()", lambda: policy.score(view), case.tensors)
        checked_scores(policy, scores, view.lengths)
    kept = pure(contract, "keep()", lambda: policy.keep(view), case.tensors)
    if kept is None:
        return
    contract.must(not policy.keeps_all, "keep() drops slots, and keeps_all says that nothing is ever dropped")
    counts = [len(slots) for slots in checked_slots(policy, kept, view.lengths)]
    if policy.visible is not None:
        return  # what is visible depends on the position
    limit = _limit(policy, view.prompt)
    contract.must(limit is None or sum(counts) <= limit * len(counts),
                  f"{sum(counts)} slots stay in {len(counts)} heads, its budget allows {limit} each")
    later = policy.keep(replace(view, seen=view.seen + 1000))
    contract.must(later is not None
                  and [len(slots) for slots in checked_slots(policy, later, view.lengths)] == counts,
                  "how many slots stay depends on view.seen, so that memory for an answer can't be predicted",
                  "use view.lengths and view.prompt")


def _limit(policy: KVPolicy, prompt: int) -> int | None:
    """Slots that a head may hold: its budget, and some until the policy acts again."""
    budget = policy.model_dump().get("budget")
    if not isinstance(budget, int | float):
        return None
    slots = max(1, int(prompt * budget)) if budget < 1 else int(budget)
    answer = 2 * PAGE + 5 if policy.decode_interval is None else policy.slack
    return slots + answer
