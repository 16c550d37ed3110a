"""``config.json`` of an EAGLE-3 head: as the paper's code, SpecForge and speculators write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.models.architecture import parse_config
from quantkit.models.config import ModelConfig
from quantkit.models.reader import HARMLESS, ConfigReader
from quantkit.support.errors import UsageError

OWN_KEYS = frozenset({"draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual",
                      "norm_before_fc", "bias", "eagle_aux_hidden_state_layer_ids"})
"""What a head's config has beside its layer's."""
NESTED = "transformer_layer_config"
"""Where speculators writes the layer's."""
BOOKKEEPING = frozenset({"speculators_config", "speculators_model_type", "speculators_version",
                         "has_no_defaults_at_init", "embed_requires_grad", "target_model_type",
                         "transformers_version", "tie_word_embeddings"})


@dataclass(frozen=True)
class Eagle3Config:
    """What a head is.

    Attributes:
        layer: its decoder layer.
        draft_vocab: tokens that it can draft.
        normed_residual: the layer's residual is behind the norm of the hidden state.
        layers: of the model, whose inputs it takes.
    """

    layer: ModelConfig
    draft_vocab: int
    normed_residual: bool
    layers: tuple[int, ...]


def read_config(hf: Mapping[str, Any], target: ModelConfig, uri: str) -> Eagle3Config:
    """Read it strictly.

    Args:
        hf: the head's ``config.json``.
        target: of the model that it drafts for.
        uri: what the head is called.

    Raises:
        UnsupportedModelError: a key is malformed, unknown or not implemented.
        UsageError: it was made for another model.
    """
    where = f"config.json of the EAGLE-3 head {uri}"
    nested = ConfigReader(hf, where).raw(NESTED)
    if nested is None:
        layer = {key: value for key, value in hf.items() if key not in OWN_KEYS | BOOKKEEPING}
        reader = ConfigReader({key: value for key, value in hf.items() if key in OWN_KEYS}, where)
    elif isinstance(nested, dict):
        layer = nested
        reader = ConfigReader({key: value for key, value in hf.items() if key != NESTED}, where)
    else:
        raise ConfigReader(hf, where).wrong(NESTED, nested, "it must be an object")
    parsed = parse_config({"model_type": "llama"} | {key: value for key, value in layer.items()
                                                     if key != "architectures"})
    if parsed.num_layers != 1:
        raise reader.wrong("num_hidden_layers", parsed.num_layers, "only heads of one layer are implemented")
    for key in ("norm_before_fc", "bias"):
        reader.only(key, (False,))
    reader.only("target_hidden_size", (target.hidden_size,))
    config = Eagle3Config(replace(parsed, sliding_windows=(None,)),
                          reader.integer("draft_vocab_size", parsed.vocab_size),
                          reader.flag("norm_before_residual"), _layers(reader, target, uri))
    reader.finish(HARMLESS | BOOKKEEPING, {})
    return config


def _layers(reader: ConfigReader, target: ModelConfig, uri: str) -> tuple[int, ...]:
    """As the config says, or those of the paper's code. In ``eagle_config`` they are layers whose outputs are
    taken, which are the next ones' inputs."""
    key, shift = "eagle_aux_hidden_state_layer_ids", 0
    stated, eagle = reader.raw(key), reader.raw("eagle_config")
    if eagle is not None:
        if not isinstance(eagle, dict):
            raise reader.wrong("eagle_config", eagle, "it must be an object")
        reader.only("use_aux_hidden_state", (True,))
        if eagle.get("use_aux_hidden_state") is False:
            raise reader.wrong("eagle_config", eagle, "only heads over several layers are implemented")
        if stated is None and eagle.get(key) is not None:
            stated, shift = eagle[key], 1
    count = target.num_layers
    if stated is None:
        return 2, count // 2, count - 3
    if not isinstance(stated, list) or not stated or not all(type(layer) is int for layer in stated):
        raise reader.wrong(key, stated, "it must be a list of layers' numbers")
    layers = tuple(layer + shift for layer in stated)
    if not all(0 <= layer <= count for layer in layers):
        raise UsageError(f"{uri} can't draft for this model", next="take the head that was made for it",
                         why=f"it wants hidden states of the layers {', '.join(map(str, stated))}, and the "
                             f"model has {count}")
    return layers
