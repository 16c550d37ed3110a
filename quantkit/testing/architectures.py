"""The contract of architectures: ``quantkit.models.architecture``."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.architecture import Architecture, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.support.errors import UnsupportedModelError
from quantkit.testing.contract import Contract
from quantkit.testing.tiny import BLOCK_FAMILIES, FAMILIES, random_weights, tiny_config

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Without these nothing can be said about a model's shape."""
FIELDS = {"hidden_size": "hidden_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
          "num_key_value_heads": "num_kv_heads", "vocab_size": "vocab_size", "head_dim": "head_dim"}
"""Keys of a ``config.json`` and the fields of a ModelConfig that have the same value."""
DEFAULTED = ("num_attention_heads", "vocab_size")
"""Keys that some families leave out where they are what transformers would take."""
UNKNOWN = {"norm_type": "layernorm", "use_mamba": True, "clip_qkv": 8.0, "num_extra_layers": 2,
           "position_embedding_type": "relative_key"}
"""Keys that no family here implements and that change what a model computes."""
MALFORMED = ("64", -1, 0, True, 1.5, [64])
CHANGED: Mapping[str, Any] = {"rms_norm_eps": 0.5, "rope_theta": 777.0}
"""Keys that change what a model computes wherever they are given."""
LARGEST = 1 << 24
"""Parameters of a model that is made for a check."""
SMALL_ERROR = 1e-4
"""The largest difference of logits of a few units, in float32."""
TOKENS = 12


def check_architecture(architecture: Architecture, config: Mapping[str, Any] | None = None) -> None:
    """Read a config, make a tiny random model of it and run it, and check what
    ``quantkit.models.architecture`` promises: a valid ModelConfig, the same one each time; finite logits, the
    same with a cache and however a prompt is cut; UnsupportedModelError for keys that are missing, malformed
    or unknown; keys that change the maths are obeyed or refused.

    Args:
        config: the ``config.json`` of a tiny model of the family, with two layers say. For a built-in family
            there is one.

    Raises:
        PluginError: a promise is broken.
    """
    contract = Contract(f"architecture {getattr(architecture, 'model_type', architecture)!r}",
                        "quantkit.models.architecture")
    contract.must(isinstance(architecture, Architecture),
                  f"it is a {type(architecture).__name__}, not an Architecture")
    classes = architecture.classes
    contract.must(isinstance(classes, tuple) and bool(classes) and all(
        isinstance(name, str) and name for name in classes), f"classes is {classes!r}, not a tuple of names")
    if config is None:
        contract.must(architecture.model_type in FAMILIES | BLOCK_FAMILIES,
                      "a config of a tiny model is needed")
        config = tiny_config(architecture.model_type)
    named = config.get("architectures")
    contract.must(named is None or bool(set(map(str, named)) & set(classes)),
                  f"the config says architectures: {named}, which classes doesn't name")
    parsed = _check_parse(contract, architecture, config)
    _check_refusals(contract, architecture, config, parsed)
    _check_model(contract, parsed)


def _check_parse(contract: Contract, architecture: Architecture, config: Mapping[str, Any]) -> ModelConfig:
    given = dict(copy.deepcopy(config))
    parsed = contract.call("parse", architecture.parse, given)
    contract.must(given == config, "parse wrote to the config")
    if not isinstance(parsed, ModelConfig):
        raise contract.error(f"parse returned a {type(parsed).__name__}, not a ModelConfig")
    contract.must(contract.call("parse", architecture.parse, given) == parsed,
                  "parse differs the second time")
    contract.must(parsed.model_type == architecture.model_type,
                  f"parse returned a config of {parsed.model_type!r}")
    for name in (*FIELDS.values(), "intermediate_size", "max_position_embeddings"):
        value = getattr(parsed, name)
        contract.must(type(value) is int and value > 0, f"{name} of its config is {value!r}")
    contract.must(parsed.num_heads % parsed.num_kv_heads == 0, "num_kv_heads doesn't divide num_heads")
    contract.must(parsed.head_dim % 2 == 0, "head_dim is odd, which rotary embedding can't be")
    contract.must(0 < parsed.rms_norm_eps < 1, f"rms_norm_eps of its config is {parsed.rms_norm_eps!r}")
    windows = parsed.sliding_windows
    contract.must(isinstance(windows, tuple) and len(windows) == parsed.num_layers,
                  f"sliding_windows must have an entry for each of {parsed.num_layers} layers")
    contract.must(parsed.experts is None or len(parsed.experts.layers) == parsed.num_layers,
                  "experts.layers must have an entry for each layer")
    for key, field in FIELDS.items():
        value = config.get(key)
        contract.must(value is None or value == getattr(parsed, field),
                      f"the config says {key} {value!r}, parse {getattr(parsed, field)!r}")
    return parsed


def _check_refusals(contract: Contract, architecture: Architecture, config: Mapping[str, Any],
                    parsed: ModelConfig) -> None:
    def refused(what: str, broken: dict[str, Any], remedy: str) -> None:
        contract.check_refusal(f"parse of a config {what}", architecture.parse, broken, remedy=remedy,
                               kind=UnsupportedModelError, accepted=f"it takes a config {what}")

    for key in REQUIRED:
        if key in config:
            less = {name: value for name, value in config.items() if name != key}
            if key not in DEFAULTED or not isinstance(_parsed(architecture, less), ModelConfig):
                refused(f"without {key}", less,
                        "raise UnsupportedModelError: read it by quantkit.models.reader.ConfigReader")
            for value in MALFORMED:
                refused(f"with {key} {value!r}", {**config, key: value},
                        "raise UnsupportedModelError: read it by quantkit.models.reader.ConfigReader")
    for key, unknown in UNKNOWN.items():
        refused(f"with the unknown key {key!r}, which may change the maths", {**config, key: unknown},
                "call ConfigReader.finish when all keys are read")
    for key, changed in CHANGED.items():
        if key in config:
            try:
                other = architecture.parse({**config, key: changed})
            except UnsupportedModelError:
                continue
            contract.must(other != parsed, f"it ignores {key}, which changes the maths")


def _parsed(architecture: Architecture, config: Mapping[str, Any]) -> object:
    """``None`` if anything is raised."""
    try:
        return architecture.parse(config)
    except Exception:  # whatever a stranger's code raises; the caller parses once more to see it
        return None


@torch.no_grad()
def _check_model(contract: Contract, config: ModelConfig) -> None:
    shapes = tensor_shapes(config)
    size = sum(math.prod(shape) for shape in shapes.values())
    contract.must(size <= LARGEST, f"the config is of a model of {size:,} parameters; give a tiny one's",
                  "num_hidden_layers 2, hidden_size 64")
    weights = random_weights(config, torch.float32)
    model = contract.call("making a model of its config", CausalLM, config, Weights(
        weights.__getitem__, weights.__contains__, torch.float32))
    ids = torch.randint(0, config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    logits = contract.call("running the model", model, ids)
    contract.must(tuple(logits.shape) == (1, TOKENS, config.vocab_size), f"logits are {list(logits.shape)}")
    contract.must(bool(torch.isfinite(logits).all()), "a logit is not finite")
    contract.must(float(logits.std()) > 0, "all logits are equal")
    size = 1 if config.diffusion is None else config.diffusion.block_size  # which may not be cut
    for name, cuts in (("one token or block at a time", list(range(size, TOKENS, size))), ("whole", []),
                       ("in chunks", sorted({cut // size * size for cut in (5, 9)} - {0}))):
        cache = KVCache(config, None, model.dtype)
        row, parts = cache.add(), []
        for start, stop in zip([0, *cuts], [*cuts, TOKENS]):
            parts.append(contract.call(f"running the model with a cache, {name}", model, ids[:, start:stop],
                                       cache=Batch(cache, [row], "decode" if start else "prefill_end")))
        difference = float((torch.cat(parts, 1) - logits).abs().max())
        contract.must(difference < SMALL_ERROR,
                      f"logits with a cache, {name}, differ from those without one by {difference:.2g}")
