"""Broken architectures, each a correct one with one fault, and what ``check_architecture`` says of each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig, parse_dense, uniform_windows
from quantkit.models.reader import ConfigReader
from quantkit.plugins.manager import registry
from quantkit.support.errors import PluginError
from quantkit.testing import check_architecture, tiny_config

CONFIG = tiny_config("llama", model_type="copied", architectures=["CopiedForCausalLM"])


def parse(config: Any) -> ModelConfig:
    reader = ConfigReader(config, "config.json of a copied model")
    reader.only("attention_bias", (False,))
    reader.only("mlp_bias", (False,))
    return parse_dense(reader, "copied", windows=uniform_windows(reader, None), qkv_bias=False, o_bias=False)


SOUND = Architecture("copied", ("CopiedForCausalLM",), parse)


def changed(**fields: Any) -> Architecture:
    """Parses as the sound one and changes fields of the result."""
    return replace(SOUND, parse=lambda config: replace(parse(config), **fields))


def ignores_unknown(config):
    known = set(CONFIG)
    return parse({name: value for name, value in config.items() if name in known})


def plain(config):
    return replace(parse({**CONFIG, **{name: value for name, value in config.items() if name in CONFIG}}),
                   hidden_size=config["hidden_size"])


def writes(config):
    parsed = parse(config)
    config.pop("use_cache")
    return parsed


def guesses(config):
    return parse({**config, "hidden_size": config.get("hidden_size", 64)})


def coerces(config):
    size = config.get("vocab_size")
    return parse({**config, "vocab_size": int(size)} if isinstance(size, str) else config)


def fixed_rope(config):
    return parse({**config, "rope_theta": 10000.0})



def counts(config):
    return replace(parse(config), embedding_scale=float(next(CALLS)))


CALLS = itertools.count(1)
ZOO = {
    "returns a dictionary": (replace(SOUND, parse=dict), "returned a dict, not a ModelConfig"),
    "returns nothing": (replace(SOUND, parse=lambda config: None), "returned a NoneType"),
    "raises": (replace(SOUND, parse=lambda config: config["n_embd"]), "parse raises KeyError"),
    "writes to the config": (replace(SOUND, parse=writes), "parse wrote to the config"),
    "another name": (replace(SOUND, model_type="other"), "a config of 'copied'"),
    "ignores unknown keys": (replace(SOUND, parse=ignores_unknown), "takes a config with the unknown key"),
    "a KeyError for a missing key": (replace(SOUND, parse=plain), "without hidden_size raises KeyError"),
    "guesses a size": (replace(SOUND, parse=guesses), "takes a config without hidden_size"),
    "takes a number as text": (replace(SOUND, parse=coerces), "takes a config with vocab_size '64'"),
    "ignores the base of RoPE": (replace(SOUND, parse=fixed_rope), "ignores rope_theta"),
    "counts": (replace(SOUND, parse=counts), "parse differs the second time"),
    "another width": (changed(hidden_size=32), "the config says hidden_size 64, parse 32"),
    "windows of another number": (changed(sliding_windows=(None,)), "an entry for each of 2 layers"),
    "an odd head": (changed(head_dim=15), "head_dim is odd"),
    "no epsilon": (changed(rms_norm_eps=0.0), "rms_norm_eps of its config is 0.0"),
    "a float for a size": (changed(intermediate_size=128.0), "intermediate_size of its config is 128.0"),
    "groups that don't fit": (changed(num_kv_heads=3), "num_kv_heads doesn't divide num_heads"),
    "logits that overflow": (changed(embedding_scale=float("inf")), "a logit is not finite"),
    "an unknown activation": (changed(activation="relu2"), "the model raises|making a model"),
    "no classes": (replace(SOUND, classes=()), "classes is"),
    "classes as a string": (replace(SOUND, classes="CopiedForCausalLM"), "classes is"),
    "other classes": (replace(SOUND, classes=("OtherForCausalLM",)), "which classes doesn't name"),
    "no architecture": (parse, "it is a function, not an Architecture"),
}


@pytest.mark.parametrize("fault", ZOO)
def test_a_broken_architecture_is_caught(fault: str) -> None:
    architecture, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        check_architecture(architecture, CONFIG)


def test_a_sound_architecture_passes() -> None:
    check_architecture(SOUND, CONFIG)


def test_a_config_is_needed_and_must_be_tiny() -> None:
    with pytest.raises(PluginError, match="a config of a tiny model is needed"):
        check_architecture(SOUND)
    with pytest.raises(PluginError, match="parameters; give a tiny one's"):
        check_architecture(SOUND, {**CONFIG, "vocab_size": 1_000_000})


@pytest.mark.parametrize("name", sorted(registry("architectures")))
def test_registered_architectures(name: str) -> None:
    check_architecture(registry("architectures").get(name))
