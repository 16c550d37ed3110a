"""The keys of a row of results that quantkit itself gives. No plugin's metric may have one of them."""

from __future__ import annotations

import re

MEASURED = ("perplexity", "kl_mean", "top1", "prefill_tok_s", "decode_tok_s")
"""Metrics that every result has as keys, ``None`` where they weren't measured."""
EXACT = "kl_exact"
"""Key of the KL from the reference's weights in float32 arithmetic."""
WORD_PERPLEXITY = "word_perplexity"
TAILS = ("kl_median", "kl_p99", "kl_p999", "flips")
"""Of single tokens' KL the median, 99% and 99.9%; and the share of tokens whose likeliest one differs."""
PER_RUN, PER_ITEM = "timed run", "item"
"""What speeds and task scores are of, in the place of a metric's token, window or run."""
RESERVED_KEYS = frozenset({
    *MEASURED, EXACT, WORD_PERPLEXITY, "model", "method", "bits_per_weight", "file_bytes", "peak_bytes",
    "load_s", "metrics", "intervals", "kernels", "manifest_sha256", "answer", "kv", "kv_bytes_per_token",
    "kv_bytes", "recipe", "tool", "texts", "window_means", "items", "differences", "speed", "measured",
    "weight_bytes",
    *TAILS})
"""Everything that ``ModelResult`` and its JSON have as a key."""

_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", re.ASCII)


def reason_against_key(key: object) -> str | None:
    """Why ``key`` can't be the key of a plugin's metric, or ``None``. A ``/`` is in tasks' keys only."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        return f"its key {key!r:.80} isn't a letter and up to 63 letters, digits, dots, dashes or underscores"
    return f"its key {key!r} is one of quantkit's" if key in RESERVED_KEYS else None
