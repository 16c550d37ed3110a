"""The output of ``quantkit plan``: the arithmetic, the roofline, and the next best combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantkit.capacity_search.losses import losses
from quantkit.capacity_search.roofline import Ceilings, compute_bound_batch, decode_step
from quantkit.capacity_search.search import Combination, pareto_front
from quantkit.cli.present import table, wrapped
from quantkit.kv.base import PAGE
from quantkit.kv.build import build_kv_codecs, build_policy
from quantkit.runtime.memory.scratch import CPU_ROWS
from quantkit.support.units import human_bytes

BETTER, WORSE = 3, 5
"""Combinations shown beside the chosen one: of those that lose less, and of those that need less."""
_SAID = {"activations": f"of {CPU_ROWS} tokens, between operations",
         "logits": "of a step, and a copy to sample from",
         "cos and sin": "of positions, up to twice as many",
         "policy": "a layer's keys and attention while it acts", "page tables": "which page holds what",
         "runtime": "Python, torch, LLVM"}


def facts(chosen: Combination, combinations: Sequence[Combination], ceilings: Ceilings
          | str) -> dict[str, Any]:
    """The whole plan as plain data, with exact bytes."""
    requirements = chosen.requirements
    config = chosen.weights.config
    cache = chosen.footprint
    turn = None if isinstance(ceilings, str) else compute_bound_batch(chosen.weights, cache, ceilings)
    cost = None if isinstance(ceilings, str) else decode_step(chosen.weights, cache, ceilings,
                                                              requirements.concurrency)
    return {
        "asked": {"context": requirements.context, "concurrency": requirements.concurrency,
                  "memory_bytes": requirements.memory, "prompt": requirements.prompt_tokens},
        "chosen": chosen.to_dict() | {"unfused": chosen.weights.fallback_reason},
        "kv": {"layers": cache.layers, "key_heads": cache.heads, "head_dim": config.head_dim,
               "numbers_per_token": _numbers(chosen), "bytes_per_token": cache.bytes_per_token,
               "waiting_bytes_per_token": cache.residual_bytes_per_token, "page_tokens": PAGE,
               "sequence_bytes": cache.sequence_bytes, "sequence_slots": cache.slots,
               "allocated_bytes": cache.allocated_bytes(requirements.concurrency),
               "windows": [window for window in config.sliding_windows if window]},
        "room": {"sequences": chosen.most_sequences(), "context": chosen.most_context()},
        "decoding": {"unknown": ceilings} if cost is None or isinstance(ceilings, str) else {
            "bandwidth": ceilings.bandwidth, "flops": ceilings.flops, "ceilings": ceilings.whose,
            **cost.to_dict(), "bound_by_compute_from_batch": turn},
        "losses": {"model": losses().model, "weights": losses().weights_measured, "kv": losses().kv_measured},
        "combinations": [other.to_dict() for other in combinations]}


def lines(model: str, chosen: Combination, combinations: Sequence[Combination], ceilings: Ceilings | str,
          left_out: Mapping[str, str]) -> Iterator[str]:
    """Lines for a terminal, but for the commands to type next."""
    requirements, config = chosen.requirements, chosen.weights.config
    yield wrapped("model", f"{model}: {config.model_type}, {config.num_layers} layers, {config.num_heads} "
                           f"heads of {config.head_dim} ({config.num_kv_heads} KV)")
    yield wrapped("asked", f"{_sequences(requirements.concurrency)} of {requirements.context:,} tokens in "
                           f"{human_bytes(requirements.memory)}")
    yield wrapped("chosen", f"weights {chosen.weights.name} ({chosen.weights.description.rstrip('.')}), "
                            f"KV cache {chosen.kv}")
    yield ""
    yield from _sum(chosen)
    yield ""
    yield wrapped("room", _room(chosen))
    yield wrapped("decoding", _decoding(chosen, ceilings))
    for text in _remarks(chosen):
        yield wrapped("note", text)
    yield ""
    yield from _others(chosen, combinations)
    if left_out:
        yield wrapped("left out", "; ".join(f"{name}: {why}" for name, why in left_out.items()))


def _sum(chosen: Combination) -> Iterator[str]:
    """The table of all terms and their total."""
    cache = chosen.footprint
    requirements = chosen.requirements
    config = chosen.weights.config
    numbers = _numbers(chosen)
    rows = [("weights", f"{chosen.weights.name}; {human_bytes(chosen.weights.file_bytes)} in files",
             _mega(chosen.weights.bytes)),
            ("KV a token", f"{cache.layers} layers × {cache.heads} key heads × 2 × {config.head_dim} × "
                           f"{8 * cache.bytes_per_token / numbers:.4g} bits", f"{cache.bytes_per_token:,} B")]
    codings = build_kv_codecs(chosen.kv)
    if cache.residual_bytes_per_token:
        rows.append(("  as computed",
                     f"the newest {codings.residual_length} to {codings.residual_length + PAGE - 1}"
                     + (f", the first {codings.first}" if codings.first else ""),
                     f"{cache.residual_bytes_per_token:,} B"))
    rows += [("KV a sequence", f"{cache.slots:,} tokens at most, in pages of {PAGE}",
              _mega(cache.sequence_bytes)),
             *(("  own windows", f"of that {kind.layers} layers: {kind.decoding.slots:,} tokens at most",
                _mega(cache.heads * kind.layers * kind.decoding.bytes))
               for kind in cache.groups if kind.model_window),
             ("KV", f"{_sequences(requirements.concurrency)}, one of them a prompt that comes in",
              _mega(chosen.kv_bytes)),
             ("KV to spare", "blocks grow by an eighth; a layer's is moved then",
              _mega(chosen.spare_bytes))]
    rows += [(name, _SAID[name], _mega(size)) for name, size in chosen.scratch.items() if size]
    rows += [("total", f"of {_mega(requirements.memory)}", _mega(chosen.total)),
             ("left", "", _mega(chosen.left))]
    yield table(["what", "how", "bytes"], rows, right=(2,), shrink=1)


def _room(chosen: Combination) -> str:
    requirements, config = chosen.requirements, chosen.weights.config
    more, longest = chosen.most_sequences() - requirements.concurrency, chosen.most_context()
    parts = [f"{_sequences(more)} more of that length" if more else "no sequence more"]
    limit = " (the model's own limit)" if longest == config.max_position_embeddings else ""
    parts.append(f"or {_sequences(requirements.concurrency)} of up to {longest:,} tokens{limit}")
    return ", ".join(parts)


def _decoding(chosen: Combination, ceilings: Ceilings | str) -> str:
    if isinstance(ceilings, str):
        return f"not known what bounds it: {ceilings}; give --bandwidth and --flops"
    batch = chosen.requirements.concurrency
    cost = decode_step(chosen.weights, chosen.footprint, ceilings, batch)
    turn = compute_bound_batch(chosen.weights, chosen.footprint, ceilings)
    if turn is None:
        when = "at no batch by compute: a sequence's own keys and values take longer to read than to use"
    elif turn <= batch:
        when = f"up to {turn - 1} by memory" if turn > 1 else "at every batch"
    else:
        when = f"from {turn:,} sequences on by compute"
    return (f"bound by {cost.bound}: a step of {_sequences(batch)} reads {human_bytes(cost.weight_bytes)} of "
            f"weights and {human_bytes(cost.kv_bytes)} of KV, {_seconds(cost.memory_s)} at "
            f"{human_bytes(ceilings.bandwidth)}/s ({ceilings.whose['bandwidth']}), "
            f"and computes {cost.flops / 1e9:,.3g} GFLOP, {_seconds(cost.compute_s)} at "
            f"{ceilings.flops / 1e9:,.4g} GFLOP/s ({ceilings.whose['flops']}); {when}. "
            f"At most {cost.tokens_s:,.3g} tokens a second in all")


def _remarks(chosen: Combination) -> Iterator[str]:
    config, policy = chosen.weights.config, build_policy(chosen.kv)
    if (windows := [kind for kind in chosen.footprint.groups if kind.model_window]):
        yield (f"{sum(kind.layers for kind in windows)} of {config.num_layers} layers see "
               f"{max(kind.window or 0 for kind in windows):,} tokens only, and hold not many more, "
               "whatever the context and the KV setting")
    if chosen.weights.fallback_reason is not None:
        yield (f"no single program for this model on a CPU (it {chosen.weights.fallback_reason}): "
               "activations are an estimate")
    if any(layer.row.spec is not None and layer.row.spec.kind == "trellis"
           for layer in chosen.weights.layers):
        yield "only quantkit loads a trellis"
    if not policy.keeps_all:
        requirements = chosen.requirements
        yield (f"what {chosen.kv.policy} drops is counted for a prompt of {requirements.prompt_tokens:,} of "
               f"the {requirements.context:,} tokens (--prompt-tokens)")


def _others(chosen: Combination, combinations: Sequence[Combination]) -> Iterator[str]:
    """The chosen one among those that lose less and don't fit, and those that need less and lose more."""
    figures = losses()
    all_of_them = pareto_front(combinations)
    before = [combination for combination in all_of_them if combination.rank < chosen.rank][-BETTER:]
    after = [combination for combination in all_of_them if combination.rank > chosen.rank
             and combination.total < chosen.total][:WORSE]
    rows = [["→" if combination is chosen else "", combination.weights.name, str(combination.kv),
             _kl(combination.weights_kl), _kl(combination.kv_kl), _kl(combination.kl),
             f"{combination.total / 1e6:,.1f}", f"{combination.left / 1e6:,.1f}"]
            for combination in (*before, chosen, *after)]
    longest = max((1, 2), key=lambda column: max(len(row[column]) for row in rows))
    yield table(["", "weights", "KV", "KL", "+ KV's", "=", "MB needed", "left"], rows, right=(3, 4, 5, 6, 7),
                shrink=longest)
    yield wrapped("", f"KL: nats a token, measured on {figures.model}; on another model the order is a "
                      "guess. Measured of both at once it is their sum, near enough", 2).lstrip()
    unknown = sorted({combination.weights.name for combination in combinations
                      if combination.weights_kl is None and combination.weights.recipe}
                     | {str(combination.kv) for combination in combinations if combination.kv_kl is None})
    if unknown:
        yield wrapped("", f"Never measured, and taken last: {', '.join(unknown)}", 2).lstrip()


def _numbers(chosen: Combination) -> int:
    return 2 * chosen.footprint.layers * chosen.footprint.heads * chosen.weights.config.head_dim


def _kl(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def _sequences(count: int) -> str:
    return f"{count:,} sequence" + ("s" if count != 1 else "")


def _mega(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
