"""Decides by rule which unknown keys of a config can't change what a model computes: each release adds keys.

A key that a family's parser doesn't ask for says nothing about the maths if its value is

- ``null``;
- **metadata**: a string under a name that says so (``_model_name_or_path``, ``base_model_revision``), or one
  that can't be the name of an implementation, since it is no single word (``"meta-llama/Llama-3"``,
  ``"4.57.1"``). A string under a name such as ``norm_type`` or ``mlp_activation`` chooses an implementation;
- **off**: ``false``, 0 or empty. Not if its name speaks of what the models here all do, such as rotation,
  norms or causal attention: without these it would be another model;
- **neutral**: 1 under a name such as ``embedding_multiplier``. Not for attention's scores, whose scale is
  another number than 1;

or if its name speaks of training alone, or of the number of a token. Everything else may change the maths.
"""

from __future__ import annotations

import re
from typing import Any

METADATA = frozenset({"name", "names", "path", "version", "revision", "commit", "hash", "sha256",
                      "license", "author", "date", "url", "description", "comment", "language", "library",
                      "framework", "id", "uuid", "implementation", "backend"})
"""Words of names whose strings describe the file, or how somebody runs it."""
CHOICES = frozenset({"act", "activation", "type", "types", "kind", "fn", "func", "function", "method",
                     "mode", "norm", "style", "strategy", "scheme", "algorithm", "pattern", "position"})
"""Words of names whose strings choose among implementations, whatever else the name says."""
ALWAYS = frozenset({"rope", "rotary", "position", "positions", "positional", "causal", "mask", "norm",
                    "norms", "normalize", "normalized", "normalization", "layernorm", "rms", "rmsnorm",
                    "eps", "residual", "gate", "gated", "glu", "swiglu", "softmax", "scale", "scaled",
                    "scaling", "multiplier", "window", "sliding", "tie", "tied"})
"""Words of names for what models do here, so that "off" would be another model."""
NEUTRAL = frozenset({"multiplier", "scale", "scaling"})
SCORES = frozenset({"attention", "attn", "query", "qk", "score", "scores", "softmax"})
TRAINING = frozenset({"dropout", "pdrop", "layerdrop", "loss", "initializer", "gradient", "checkpointing"})
TOKENS = ("_token_id", "_token_ids", "_token_index")
_ONE_WORD = re.compile(r"[\w+-]+")


def says_nothing(key: str, value: Any) -> bool:
    """Whether this unknown key can't change what the model computes."""
    words = set(re.split(r"[^a-z0-9]+", key.lower()))
    if value is None or words & TRAINING or key.endswith(TOKENS):
        return True
    if isinstance(value, str) and value:
        if words & CHOICES:
            return False
        return key.startswith("_") or bool(words & METADATA) or _ONE_WORD.fullmatch(value) is None
    if not value:
        return not words & ALWAYS
    return value == 1 and not isinstance(value, bool) and bool(words & NEUTRAL) and not words & SCORES
