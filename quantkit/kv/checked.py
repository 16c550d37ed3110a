"""Checks of what policies and codecs return: cheap ones, and none for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from quantkit.kv.base import KERNEL_NAMES, PAGE, KVCodecs, KVPolicy, SideCodec, is_ours
from quantkit.kv.sequence import SequenceState
from quantkit.kv.spec import KVSpec
from quantkit.kv.store import PageStore
from quantkit.plugins.manager import describe_entry, registry
from quantkit.support.errors import PluginError

OWN_POLICIES = "quantkit.kv.policies."
"""Modules of the built-in policies, which have tests instead."""
_sound: set[tuple[object, ...]] = set()
"""Sides that were tried: type, name, head dimension and dtype."""


def checked_slots(policy: KVPolicy, kept: Any, lengths: Sequence[int]) -> list[torch.Tensor]:
    """What :meth:`~quantkit.kv.base.KVPolicy.keep` returned, as a list of a tensor for each head.

    Args:
        kept: a tensor ``[Hkv, n]`` or a sequence of Hkv tensors ``[n]``.
        lengths: the slots that each head holds.

    Raises:
        PluginError: it isn't int64, of that shape, in rising order, within a head's length and at least one
            slot a head; or heads keep different numbers though the policy promises equal ones.
    """
    def refuse(what: str) -> PluginError:
        return _error("kv_policies", policy.name, f"keep() returned {what}",
                      "for each KV head it returns int64 [n], slots in rising order; or None")

    if type(policy).__module__.startswith(OWN_POLICIES):
        return list(kept)
    if not isinstance(kept, torch.Tensor | list | tuple):
        raise refuse(f"a {type(kept).__name__}")
    if len(kept) != len(lengths):
        raise refuse(f"slots of {len(kept)} heads; there are {len(lengths)}")
    heads = list(kept)
    for head, (slots, length) in enumerate(zip(heads, lengths)):
        if not isinstance(slots, torch.Tensor) or slots.dtype != torch.int64 or slots.dim() != 1:
            raise refuse(f"for head {head} {_described(slots)}")
        if not len(slots):
            if policy.visible is not None:  # the next query may see nothing that is stored
                continue
            raise refuse(f"no slot for head {head}")
        if bool((slots[1:] <= slots[:-1]).any()):
            raise refuse(f"slots of head {head} that don't rise")
        if int(slots[0]) < 0 or int(slots[-1]) >= length:
            raise refuse(f"slot {int(slots[-1] if slots[0] >= 0 else slots[0])} of head {head}, which holds "
                         f"{length}")
    if policy.uniform_budget and policy.visible is None and len(set(map(len, heads))) > 1:
        counts = ", ".join(map(str, map(len, heads)))
        raise refuse(f"{counts} slots; heads keep equally many unless uniform_budget is False")
    return heads


def reason_against_policy(policy: KVPolicy) -> str | None:
    """What is wrong with what a policy declares; ``None`` if nothing."""
    if policy.on_prefill not in (None, "chunk", "end"):
        return f"on_prefill is {policy.on_prefill!r}: chunk, end or None"
    if policy.tracks not in (None, "attention_sum", "attention_max", "query_moments"):
        return f"tracks is {policy.tracks!r}: attention_sum, attention_max, query_moments or None"
    least = {"query_window": 0, "decode_interval": 1, "slack": 0, "reread_prompt": 1,
             "release_granularity": PAGE}
    for name, number in least.items():
        value = getattr(policy, name)
        if value is not None and (type(value) is not int or value < number):
            return f"{name} is {value!r}: a number from {number} on"
    if policy.visible is not None and (not isinstance(policy.visible, tuple) or len(policy.visible) != 2):
        return f"visible is {policy.visible!r}: (window, sinks) or None"
    if policy.release_granularity % PAGE:
        return f"release_granularity is {policy.release_granularity!r}: a multiple of {PAGE}"
    acts = (policy.on_prefill, policy.decode_interval, policy.reread_prompt) != (None, None, None)
    if not policy.keeps_all and not acts:
        return "it never acts: on_prefill and decode_interval are None"
    if policy.tracks is not None and policy.reread_prompt is None and policy.query_window == 0:
        return f"it tracks {policy.tracks} in blocks of query_window queries, which is 0"
    return None


def check_policy_declarations(policy: KVPolicy) -> None:
    """Raises PluginError for a plugin's policy whose declarations can't be followed."""
    builtin = type(policy).__module__.startswith(OWN_POLICIES)
    if not builtin and (fault := reason_against_policy(policy)) is not None:
        raise _error("kv_policies", policy.name, fault,
                     "quantkit.kv.base.KVPolicy says what a policy declares")


def _error(kind: str, name: str, what: str, why: str, next: str | None = None) -> PluginError:
    table = registry(kind)
    owner = table.entry(name).owner if name in table else "NAME"
    return PluginError(f"{describe_entry(kind, name)}: {what}", why=why,
                       next=next or f"quantkit plugins check {owner}, or use another --kv")


def check_codecs(codecs: KVCodecs, spec: KVSpec, dim: int, dtype: torch.dtype) -> None:
    """Put a plugin's codecs to one page of vectors, once in a process. Built-in ones have tests for that.

    Args:
        spec: the setting that named them.
        dim: the head dimension.
        dtype: the dtype in which keys and values are computed.

    Raises:
        PluginError: a layout isn't one, what is encoded differs from it, or what is decoded isn't finite.
        UsageError: the codec doesn't support the head dimension.
    """
    sides = (spec.codec, codecs.keys), (spec.values or spec.codec, codecs.values)
    key = (*((type(side), side.name) for _, side in sides), dim, dtype)
    if key in _sound:
        return
    for name, side in sides:
        if not is_ours(side):
            _check_side(side, name, dim, dtype)
    if codecs.keys.name == codecs.values.name and not _alike(codecs, dim, dtype):
        raise _error("kv_codecs", spec.codec, "its keys and values are stored in other bytes under the same "
                     f"name {codecs.keys.name!r}",
                     "a side's name identifies its bytes: it must say everything that they depend on")
    _sound.add(key)


def _alike(codecs: KVCodecs, dim: int, dtype: torch.dtype) -> bool:
    """Whether both sides store the same of the same vectors, as far as a side does so twice."""
    x = torch.linspace(-1, 1, PAGE * dim).reshape(PAGE, dim).to(dtype)
    keys, again, values = (side.encode(x.clone()) for side in (codecs.keys, codecs.keys, codecs.values))
    return keys.keys() == values.keys() and all(
        torch.equal(keys[name], values[name]) or not torch.equal(keys[name], again[name]) for name in keys)


def _check_side(codec: SideCodec, registered: str, dim: int, dtype: torch.dtype) -> None:
    refuse = partial(_error, "kv_codecs", registered)
    if not isinstance(codec.name, str) or not codec.name or not isinstance(codec.hadamard, bool):
        raise refuse(f"its name is {codec.name!r} and hadamard is {codec.hadamard!r}",
                     "a SideCodec's name is text that says everything about its bytes, and hadamard a bool")
    if codec.name in KERNEL_NAMES:
        raise refuse(f"a side of it is called {codec.name!r}",
                     "kernels know a built-in codec by that name, and would read other bytes")
    layouts = {"layout": codec.layout(dim, dtype), "shared": codec.shared(dim, dtype)}
    for method, layout in layouts.items():
        if not isinstance(layout, Mapping) or not all(map(_is_part, layout.items())):
            raise refuse(f"{method}() returned {str(layout)[:120]}",
                         'it maps a name to a shape and a dtype: {"codes": ((dim,), torch.int8)}')
    if not layouts["layout"] or layouts["layout"].keys() & layouts["shared"].keys():
        raise refuse("layout() is empty or shares a name with shared()", "each part has one place")
    sample = torch.linspace(-1, 1, 2 * PAGE * dim).reshape(2, PAGE, dim)
    for x in (torch.zeros_like(sample), sample, sample.to(dtype)):
        parts = codec.encode(x)
        wanted = {name: ((2, PAGE, *shape), kind) for name, (shape, kind) in layouts["layout"].items()}
        wanted |= {name: ((2, *shape), kind) for name, (shape, kind) in layouts["shared"].items()}
        actual = {name: (tuple(part.shape), part.dtype) if isinstance(part, torch.Tensor) else part
                  for name, part in parts.items()} if isinstance(parts, Mapping) else parts
        if actual != wanted:
            raise refuse(f"encode() of [2, {PAGE}, {dim}] returned {_listed(actual)}",
                         f"by its layout that is {_listed(wanted)}")
        vectors = codec.decode(parts)
        if not isinstance(vectors, torch.Tensor) or not vectors.dtype.is_floating_point or (
                vectors.shape != x.shape):
            raise refuse(f"decode() returned {_described(vectors)}", f"it was given codes of {list(x.shape)}")
        if not bool(torch.isfinite(vectors).all()):
            raise refuse("decode() gives values that aren't finite", "they came from finite vectors")
    unwritten = {name: torch.zeros(shape, dtype=kind) for name, (shape, kind) in wanted.items()}
    if not bool(torch.isfinite(codec.decode(unwritten)).all()):
        raise refuse("decode() of zeros gives values that aren't finite",
                     "a page's slots are zeros until they are written, and are decoded with the others")


def codec_fault(stores: Sequence[PageStore], sequence: SequenceState, codecs: KVCodecs,
                spec: KVSpec) -> PluginError | None:
    """Why a plugin's codec may be to blame for output that isn't finite; ``None`` if it isn't.

    Args:
        sequence: the sequence that the output belongs to.
        codecs, spec: the cache's codecs and setting.
    """
    sides = {"k": (spec.codec, codecs.keys), "v": (spec.values or spec.codec, codecs.values)}
    for side, (name, codec) in sides.items():
        for index, (store, state) in enumerate(zip(stores, sequence.layers)):
            if is_ours(codec) or not int(state.lengths.max()):
                continue
            if bool(torch.isfinite(store.read(state, side)).all()):
                continue
            what = "keys" if side == "k" else "values"
            finite = store.stored_finite(side, store.table(state))
            if finite:
                return _error("kv_codecs", name, f"decode() gives {what} that aren't finite",
                              f"in layer {index}, of codes that are finite: the model's weights are not the "
                              "cause")
            return _error("kv_codecs", name, f"decode() gives {what} that aren't finite",
                          f"in layer {index}: encode() made codes that aren't finite, or the model's {what} "
                          "weren't, because its dtype overflows",
                          "--kv none shows which: then --dtype float32")
    return None


def _is_part(part: tuple[Any, Any]) -> bool:
    name, about = part
    return (isinstance(name, str) and name.isidentifier() and name != "decoded" and isinstance(about, tuple)
            and len(about) == 2 and isinstance(about[1], torch.dtype) and isinstance(about[0], tuple)
            and all(type(size) is int and size > 0 for size in about[0]))


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else (
        f"a {type(value).__name__}")


def _listed(parts: Any) -> str:
    if not isinstance(parts, Mapping):
        return f"a {type(parts).__name__}"
    described = {name: f"{about[1]} {list(about[0])}" if isinstance(about, tuple) else (
        f"a {type(about).__name__}") for name, about in parts.items()}
    return ", ".join(f"{name} {text}" for name, text in sorted(described.items())).replace("torch.", "")


def checked_budget(policy: KVPolicy, budget: Any) -> int:
    """What ``layer_budget`` of a :class:`~quantkit.kv.policies.score_policy.ScorePolicy` returned. Raises
    PluginError if it isn't a number of slots."""
    if type(budget) is int and budget > 0:
        return budget
    raise _error("kv_policies", policy.name, f"layer_budget() returned {budget!r:.60}",
                 "it is how many slots stay in each head, an int from 1 on")


def checked_scores(policy: KVPolicy, scores: Any, lengths: Sequence[int]) -> torch.Tensor:
    """What :meth:`~quantkit.kv.policies.score_policy.ScorePolicy.score` returned, with −∞ beyond a head's
    length.

    Raises:
        PluginError: it isn't a floating-point tensor ``[Hkv, S]``, or a slot's score is NaN.
    """
    shape = (len(lengths), max(lengths))
    if not isinstance(scores, torch.Tensor) or not scores.dtype.is_floating_point or scores.shape != shape:
        what = _described(scores)
    else:
        ends = torch.tensor(lengths, device=scores.device)[:, None]
        scores = scores.masked_fill(torch.arange(shape[1], device=scores.device) >= ends, -torch.inf)
        if not bool(torch.isnan(scores).any()):
            return scores
        what = "NaN"
    raise _error("kv_policies", policy.name, f"score() returned {what}",
                 f"it returns float32 {list(shape)}: a number for each slot of each KV head")
