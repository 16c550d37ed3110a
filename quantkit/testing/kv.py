"""The contracts of KV policies and KV codecs: ``quantkit.kv.base``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from quantkit.evaluation.quality.feed import prefill
from quantkit.kv.base import PAGE, KVCodec, KVCodecs, KVPolicy, PolicyView, SideCodec, is_ours
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.checked import check_codecs, checked_scores, checked_slots, reason_against_policy
from quantkit.kv.policies.score_policy import ScorePolicy
from quantkit.kv.spec import KVSpec
from quantkit.runtime.loader import LoadedModel, load
from quantkit.runtime.memory.kv import footprint
from quantkit.runtime.memory.scratch import PREFILL_CHUNK
from quantkit.support.errors import PluginError, UsageError
from quantkit.testing.contract import Contract, named_class, registered, same
from quantkit.testing.tiny import VOCAB, tiny_model

HEADS = 3
GROUP = 2
DIM = 32
LENGTHS = (1, 3, PAGE - 1, PAGE, PAGE + 1, 130, 300)
PROMPT, ANSWER = 300, 2 * 64 + 5
"""Tokens of a text: some pages, and an answer in which pages fill up."""
DIMS = (64, 128, 96, 32)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Options = TypeVar("Options", bound=BaseModel)
SMALLEST = 2.0**-100
"""An error below this is none."""


def check_policy(kind: type[KVPolicy], **options: Any) -> None:
    """Let a policy choose among ordinary and awkward slots, and run a tiny model with it.

    Checked are what its class declares, what ``keep`` and ``score`` return for many lengths and for slots
    that are all alike, that it asks only for what it declares, writes to nothing, gives the same twice, that
    the number of slots that stay doesn't depend on how many were dropped before, that its budget is obeyed
    and memory given back, and that a sequence's logits are the same alone and beside another.

    Args:
        kind: the class that is registered.
        options: the policy's options; a ``budget`` without a default is half of the prompt, or 128 tokens.

    Raises:
        PluginError: a promise is broken; the slots are named.
    """
    name = named_class(kind, KVPolicy, "KV policy")
    contract = Contract(f"KV policy {name!r}", "quantkit.kv.base")
    policy = _made_policy(kind, options, contract)
    contract.must_not(reason_against_policy(policy))
    cases = {f"{length} slots": (length,) * HEADS for length in LENGTHS}
    if not policy.uniform_budget:
        cases["heads of 130, 64 and 7 slots"] = (130, 64, 7)
    for case, lengths in cases.items():
        _check_choice(policy, lengths, None, contract.at(case))
    for case, value in (("130 slots that are all alike", 0.5), ("130 slots of zeros", 0.0)):
        _check_choice(policy, (130,) * HEADS, value, contract.at(case))
    chosen = {**options, **policy.model_dump(include={"budget"})}
    limit = _limit(policy, PROMPT)
    with registered("kv_policies", name, kind):
        for codec in ("none", "int4"):
            here = contract.at(f"with {codec}")
            slots = _check_setting(KVSpec(policy=name, options=chosen, codec=codec), DIM, here)
            bounded = policy.uniform_budget and policy.visible is None
            here.must(not bounded or limit is None or slots <= limit,
                      f"a head holds {slots} slots after a prompt of {PROMPT} tokens and an answer, its "
                      f"budget and its slack allow {limit}")


def _made_policy(kind: type[KVPolicy], options: dict[str, Any], contract: Contract) -> KVPolicy:
    field = kind.model_fields.get("budget")
    if field is None or not field.is_required() or "budget" in options:
        return _made(kind, options, contract)
    try:
        return kind.model_validate({"budget": 0.5, **options})
    except ValidationError:
        return _made(kind, {"budget": 128, **options}, contract)


def _made(kind: type[Options], options: Mapping[str, Any], contract: Contract) -> Options:
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise contract.error(f"it can't be made with {dict(options) or 'its defaults'}: "
                             f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
                             "give an option a default, or give it to the check") from None


def policy_view(keys: torch.Tensor, lengths: Sequence[int] | None = None,
                **parts: Any) -> PolicyView:
    """What a policy sees at the end of a prompt. Asking for a part that isn't given raises PluginError.

    Args:
        keys: ``[Hkv, S, D]``.
        lengths: the slots that each head holds; all S by default.
        parts: ``values`` (by default the keys), ``window_attention``, ``attention_received`` and
            ``future_queries``, which is a mean and a covariance.
    """
    heads, longest, _ = keys.shape
    lengths = tuple(lengths or (longest,) * heads)
    at = torch.arange(longest, dtype=torch.int32).expand(heads, -1)
    positions = at.masked_fill(at >= torch.tensor(lengths)[:, None], -1).contiguous()

    def part(name: str, declaration: str) -> Callable[..., Any]:
        def missing() -> NoReturn:
            raise PluginError(f"it asks for view.{name}", why="it doesn't declare that",
                              next=f"declare it: {declaration}")

        return lambda *_: parts[name] if name in parts else missing()

    return PolicyView(
        layer=0, layers=2, lengths=lengths, seen=longest, prompt=longest, positions=lambda: positions,
        keys=lambda: keys, values=lambda: parts.get("values", keys),
        window_attention=part("window_attention",
                              "a property query_window that returns the number of queries"),
        attention_received=part("attention_received",
                                'tracks: ClassVar = "attention_sum" (or "attention_max")'),
        future_queries=part("future_queries", 'tracks: ClassVar = "query_moments"'))


def _check_choice(policy: KVPolicy, lengths: tuple[int, ...], value: float | None,
                  contract: Contract) -> None:
    """Let a policy choose among random slots, or slots that all have ``value``."""
    longest, heads = max(lengths), len(lengths)
    random = torch.Generator().manual_seed(longest)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) if value is None else torch.full(shape, value)

    beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    keys = made(heads, longest, DIM)
    tensors = {"keys": keys, "values": made(heads, longest, DIM)}
    attention = made(heads, longest).abs().masked_fill(beyond, 0)
    if policy.query_window:
        tensors["window_attention"] = attention
    if policy.tracks in ("attention_sum", "attention_max"):
        tensors["attention_received"] = attention.clone()
    moments = {"future_queries": (made(heads * GROUP, DIM), torch.eye(DIM).expand(heads * GROUP, -1, -1))
               } if policy.tracks == "query_moments" else {}
    given = {name: tensor for name, tensor in tensors.items() if name != "keys"}
    view = policy_view(keys, lengths, **given, **moments)
    if isinstance(policy, ScorePolicy):
        checked_scores(policy, contract.pure("score()", lambda: policy.score(view), tensors), lengths)
    kept = contract.pure("keep()", lambda: policy.keep(view), tensors)
    if kept is None:
        return
    contract.must(not policy.keeps_all, "keep() drops slots, and keeps_all says that nothing is ever dropped")
    counts = [len(slots) for slots in checked_slots(policy, kept, lengths)]
    if policy.visible is not None:
        return  # what is visible depends on the position
    limit = _limit(policy, view.prompt)
    contract.must(limit is None or sum(counts) <= limit * len(counts),
                  f"{sum(counts)} slots stay in {len(counts)} heads, its budget allows {limit} each")
    later = policy.keep(replace(view, seen=view.seen + 1000))
    contract.must(later is not None
                  and [len(slots) for slots in checked_slots(policy, later, lengths)] == counts,
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


def check_codec(kind: type[KVCodec], **options: Any) -> None:
    """Encode and decode ordinary and awkward vectors, and run a tiny model over such a cache.

    For each side, head dimension and dtype that the codec takes: layouts and dtypes, finite results, no
    argument written to, the same result twice, tokens that don't depend on each other unless they share a
    page, and vectors closer than zeros. With options that change what is stored, a side's name must change
    too. Then the model's logits must be the same alone and beside another sequence.

    Args:
        kind: the class that is registered.
        options: the codec's options; by default its own.

    Raises:
        PluginError: a promise is broken; the side, the dimension and the vectors are named.
    """
    name = named_class(kind, KVCodec, "KV codec")
    contract = Contract(f"KV codec {name!r}", "quantkit.kv.base")
    codec = _made(kind, options, contract)
    sides = {side: contract.call(f"{side}()", getattr(codec, side)) for side in ("keys", "values")}
    for side, made in sides.items():
        contract.must(isinstance(made, SideCodec), f"{side}() returned a {type(made).__name__}",
                      "give it name, hadamard, layout, shared, encode and decode, as SideCodec has them")
    with registered("kv_codecs", name, kind):
        dims = [dim for dim in DIMS if _takes(codec, dim, contract)]
        contract.must(bool(dims), f"it refuses every head dimension of {', '.join(map(str, DIMS))}")
        for dim in dims:
            for dtype in DTYPES:
                check_codecs(KVCodecs(sides["keys"], sides["values"]), KVSpec(codec=name), dim, dtype)
                for side, made in sides.items():
                    here = contract.at(f"{side} [{dim}] {dtype}".replace("torch.", ""))
                    _check_vectors(made, dim, dtype, here)
        _check_names(kind, codec, dims[0], contract)
        _check_setting(KVSpec(codec=name, codec_options=options), dims[0], contract)


def _takes(codec: KVCodec, dim: int, contract: Contract) -> bool:
    for side in (codec.keys(), codec.values()):
        try:
            side.layout(dim, torch.bfloat16)
        except UsageError:
            return False
        except Exception as error:
            raise contract.error(f"it fails at a head dimension of {dim}: {type(error).__name__}: {error}",
                                 "raise UsageError in layout() for what it doesn't support") from error
    return True


def _vectors(dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Ordinary and awkward vectors ``[2, 64, dim]``, all finite in ``dtype`` and at most 2^126."""
    normal = torch.randn(2, PAGE, dim, generator=torch.Generator().manual_seed(0))
    outlier, channel = normal.clone(), normal.clone()
    outlier[0, 3, 5] = 1e4
    channel[..., 7] += 30
    largest = torch.full_like(normal, min(torch.finfo(dtype).max, 2.0**126))
    largest[..., ::2] *= -1
    made = {"normal": normal, "one outlier": outlier, "a large channel": channel,
            "zeros": torch.zeros_like(normal), "equal": torch.full_like(normal, 0.3),
            "denormal": normal * torch.finfo(dtype).tiny * 0.1, "the largest": largest,
            "one large token": torch.cat((normal[:, :1] * 1e3, normal[:, 1:]), 1)}
    return {name: x.to(dtype) for name, x in made.items()}


def _check_vectors(codec: SideCodec, dim: int, dtype: torch.dtype, contract: Contract) -> None:
    for name, x in _vectors(dim, dtype).items():
        here = contract.at(f"vectors {name!r}")
        parts = here.pure("encode()", partial(codec.encode, x), {"x": x})
        back = here.pure("decode()", partial(codec.decode, parts), parts)
        for part_name, part in parts.items():
            here.must(not part.dtype.is_floating_point or bool(torch.isfinite(part).all()),
                      f"encode() gives a {part_name} that isn't finite")
        here.must(bool(torch.isfinite(back).all()), "decode() gives values that aren't finite")
        wide = x.double()
        error, size = (float(vectors.square().sum()) for vectors in (back.double() - wide, wide))
        here.must(error <= size * 1.0001 + x.numel() * SMALLEST**2,
                  "zeros would be closer than what is decoded: encode() and decode() aren't inverses")
        if codec.shared(dim, dtype):
            continue
        for head, start, stop in ((0, 0, 1), (1, 3, 8), (0, PAGE - 1, PAGE)):
            alone = codec.encode(x[head, start:stop])
            here.must(same({name: part[head, start:stop] for name, part in parts.items()}, alone),
                      "a token's codes depend on the others, which come in groups of any size",
                      "put what 64 tokens share into shared()")


def _check_names(kind: type[KVCodec], codec: KVCodec, dim: int, contract: Contract) -> None:
    """Options that change the bytes must change the name: kernels and programs are chosen by it."""
    x = _vectors(dim, torch.float32)["normal"]
    for option, other in _variants(kind, codec):
        for side in ("keys", "values"):
            mine, its = getattr(codec, side)(), getattr(other, side)()
            if mine.name == its.name and not is_ours(mine):
                contract.must(same(mine.encode(x), its.encode(x)),
                              f"with {option} its {side} are stored in other bytes under the same name "
                              f"{mine.name!r}", "say everything that the bytes depend on in the side's name")


def _variants(kind: type[KVCodec], codec: KVCodec) -> Iterator[tuple[str, KVCodec]]:
    """The codec with one option changed, where that is valid."""
    for option in kind.model_fields:
        value = getattr(codec, option)
        others: tuple[Any, ...] = (not value,) if isinstance(value, bool) else (
            value + 1, value - 1, value * 2) if isinstance(value, int | float) else ()
        for other in others:
            try:
                yield f"{option}={value}", kind.model_validate({**codec.model_dump(), option: other})
            except (ValidationError, UsageError):
                continue


@dataclass
class _TextRun:
    """What running a text left.

    Attributes:
        logits: the logits after the prompt and after each token of the answer, ``[1 + ANSWER, vocab]``.
        slots: the most slots that a head holds at the end.
        used: the most bytes of pages in use, at the end of a step.
    """

    logits: torch.Tensor
    slots: int
    used: int


def _check_setting(spec: KVSpec, dim: int, contract: Contract) -> int:
    """Run a tiny model with a KV setting whose policy and codec are registered.

    Args:
        dim: the head dimension of the model.

    Returns:
        The most slots that a head holds after a text that ran alone.

    Raises:
        PluginError: logits aren't finite or depend on another sequence, or more memory is used than
            predicted.
    """
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        loaded = load(str(tiny_model(folder, "mistral", head_dim=dim, max_position_embeddings=2048)))
        texts = torch.randint(4, VOCAB, (2, PROMPT + ANSWER), generator=torch.Generator().manual_seed(0))
        alone = _run(loaded, spec, texts[:1].tolist())
        contract.must(bool(torch.isfinite(alone.logits).all()), "a tiny model's logits aren't finite with it")
        beside = _run(loaded, spec, texts.tolist())
        contract.must(torch.equal(alone.logits, beside.logits),
                      "a sequence's logits depend on another one that runs beside it")
        undecoded = _run(loaded, spec, texts[:1].tolist(), limit=0)
        contract.must(torch.equal(alone.logits, undecoded.logits),
                      "logits depend on whether pages are kept decoded or decoded in each step",
                      "let decode() give the same for a page whatever other pages it is given with")
        predicted = footprint(loaded.config, spec, loaded.dtype, PROMPT + ANSWER, PROMPT, PREFILL_CHUNK)
        contract.must(alone.used <= predicted.used_bytes(1),
                      f"a text takes {alone.used:,} bytes, {predicted.used_bytes(1):,} are predicted",
                      "let the number of slots that stay depend on view.lengths and view.prompt alone")
        return alone.slots


def _run(loaded: LoadedModel, spec: KVSpec, texts: Sequence[Sequence[int]],
         limit: int | None = None) -> _TextRun:
    """Run texts side by side; the result is of the first. ``limit``: bytes of pages that are kept decoded."""
    cache = KVCache(loaded.config, spec, loaded.dtype, loaded.model.device)
    if limit is not None:
        cache.decoded.bound(limit)
    rows = [cache.add(len(text)) for text in texts]
    prompts = [prefill(loaded, cache, row, text[:PROMPT]).clone() for row, text in zip(rows, texts)]
    logits, used = [prompts[0].reshape(1, -1).float()], cache.used_bytes
    for at in range(PROMPT, PROMPT + ANSWER):
        ids = torch.tensor([[text[at]] for text in texts])
        logits.append(loaded.model(ids, cache=Batch(cache, rows, "decode"))[0, -1:].float().clone())
        used = max(used, cache.used_bytes)
    return _TextRun(torch.cat(logits), max(map(max, cache.slots(rows[0]))), used)
