"""Reads a ``config.json`` strictly: a key that might change the maths is used, or it is an error.

Each release of a model adds keys. One that a family's parser doesn't ask for says nothing about the maths if
its value is

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
from collections.abc import Collection, Mapping
from typing import Any

from quantkit.support import patterns
from quantkit.support.errors import UnsupportedModelError, did_you_mean

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


HARMLESS = frozenset({
    # identity and bookkeeping
    "model_type", "architectures", "auto_map", "torch_dtype", "dtype", "quantization_config",
    "quantization",
    "transformers.js_config", "is_llama_config", "unsloth_fixed", "tokenizer_class", "processor_class",
    "finetuning_task", "task_specific_params", "id2label", "label2id", "problem_type", "torchscript",
    "use_bfloat16",
    # heads that draft further tokens
    "num_nextn_predict_layers", "mtp_num_hidden_layers",
    # how others run it
    "use_cache", "_attn_implementation_autoset", "_flash_attn_2_enabled", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "keys_to_ignore_at_inference",
    # defaults of generation: the sampler has its own
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
    "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty", "prefix",
})
"""Keys that say nothing about what the model computes, whatever their value; for others there is
:func:`says_nothing`."""

INERT: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tf_legacy_loss": (False,),
}
"""Keys that may appear with these values only; any other value would change the maths."""

LIMIT, HUGE = 2**31 - 1, 1e30


class ConfigReader:
    """A config dictionary that remembers which keys were asked for.

    A key whose value is ``null`` counts as absent, as it mostly does in transformers; :meth:`null` tells.

    Args:
        config: the parsed ``config.json``, or a table inside of it.
        where: how messages name it: ``config.json of a llama model``.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self.where = config, where
        self._asked: set[str] = set()

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it is, ``default`` if it is absent or null."""
        self._asked.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def null(self, key: str) -> bool:
        """Whether the key is there and says nothing."""
        return key in self._config and self._config[key] is None

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = LIMIT) -> int:
        """An integer in ``[minimum, maximum]``. UnsupportedModelError if it is another or missing."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, value, f"it must be an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number below 1e30. UnsupportedModelError if it is another or missing."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < HUGE:
            raise self.wrong(key, value, f"it must be a number between 0 and {HUGE:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean. UnsupportedModelError if it is anything else."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "it must be true or false")
        return value

    def only(self, key: str, allowed: Collection[Any]) -> None:
        """Accept ``key`` when it is absent or one of ``allowed``. UnsupportedModelError otherwise."""
        value = self.raw(key)
        if value is not None and not any(_same(value, choice) for choice in allowed):
            listed = ", ".join(map(repr, allowed)) or "null"
            raise self.wrong(key, value, f"only {listed} is implemented")

    def finish(self, harmless: Collection[str] = HARMLESS,
               inert: Mapping[str, tuple[Any, ...]] = INERT) -> None:
        """Refuse what nobody asked for.

        Raises:
            UnsupportedModelError: a key is neither used nor harmless, and its value may change the maths
                (:func:`says_nothing`); or an inert key has a value that does.
        """
        for key, allowed in inert.items():
            if key not in self._asked:
                self.only(key, allowed)
        for key, value in self._config.items():
            if key in self._asked or key in harmless or key in inert:
                continue
            if not says_nothing(key, value):
                known = self._asked | set(harmless) | set(inert)
                near = did_you_mean(str(key), known).split("known:")[0].strip()
                raise self.wrong(key, value, f"no such key is implemented. {near}".strip())

    def pattern(self, key: str, text: str) -> re.Pattern[str]:
        """``text`` of a key as a regular expression. Raises UnsupportedModelError: it is none, or a match may
        take long."""
        try:
            return patterns.compiled(text)
        except ValueError as error:
            raise self.wrong(key, text[:80], f"it {error}") from None

    def wrong(self, key: str, value: object, why: str) -> UnsupportedModelError:
        """The error for one key, with its value cut to a readable length."""
        shown = repr(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        return UnsupportedModelError(
            f"{self.where}: {key!r} is {shown}", why=f"{why}; a key that changes the maths is never ignored",
            next="use a model of a supported family, or correct the config: quantkit plugins list")

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is None:
            near = did_you_mean(key, map(str, self._config)).split("known:")[0].strip()
            if key in self._config:
                near = "it is null, and has no default"
            raise UnsupportedModelError(f"{self.where}: {key!r} is missing", why=near or None,
                                        next="get the model's complete config.json")
        return value


def _same(value: object, allowed: object) -> bool:
    """Equal, and not merely because Python holds ``True == 1``."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
