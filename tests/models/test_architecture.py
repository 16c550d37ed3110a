"""How a config finds its family, and the list of tensors that follows from it."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import UnsupportedModelError
from quantkit.models.architecture import linear_slots, parse_config, tensor_shapes
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.testing import tiny_weights


def test_an_unknown_family_lists_the_known_ones(make_config):
    with pytest.raises(UnsupportedModelError, match=r"'qwen4'\n.*did you mean 'qwen[23]'.*llama, mistral"):
        parse_config(make_config("qwen3", model_type="qwen4"))


@pytest.mark.parametrize("value", [None, 3, ["llama"]])
def test_a_model_type_that_is_no_name(make_config, value):
    with pytest.raises(UnsupportedModelError):
        parse_config(make_config("llama", model_type=value))


def test_another_head_is_refused(make_config):
    with pytest.raises(UnsupportedModelError, match="LlamaForSequenceClassification"):
        parse_config(make_config("llama", architectures=["LlamaForSequenceClassification"]))


def test_slots_are_the_models_linears_in_order(make_config, make_model):
    for tied in (True, False):
        config = make_config("qwen3", tie_word_embeddings=tied)
        model, slots = make_model(config), linear_slots(parse_config(config))
        assert [s.name for s in slots] == list(model.linears())
        assert all(model.linears()[s.name].shape == (s.out_features, s.in_features) for s in slots)
        assert (slots[-1].name, slots[-1].layer) == (
            ("model.layers.1.mlp.down_proj", 1) if tied else ("lm_head", None))


def test_layers_that_see_one_input_share(make_config):
    groups: dict[str, list[str]] = {}
    for slot in linear_slots(parse_config(make_config("llama", tie_word_embeddings=False))):
        groups.setdefault(slot.shares, []).append(slot.name.rsplit(".", 1)[-1])
    assert list(groups.values()) == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"],
                                     ["down_proj"]] * 2 + [["lm_head"]]


@pytest.mark.parametrize(("family", "keys"), [
    ("llama", {"attention_bias": True, "mlp_bias": True}), ("mistral", {"tie_word_embeddings": False}),
    ("qwen2", {}), ("qwen3", {"tie_word_embeddings": False})])
def test_a_model_reads_exactly_the_tensors_that_are_listed(make_config, family, keys):
    config = make_config(family, **keys)
    weights, read = tiny_weights(config), []
    source = Weights(lambda n: read.append(n) or weights[n], weights.__contains__, torch.float32)
    CausalLM(parse_config(config), source)
    assert sorted(read) == sorted(tensor_shapes(parse_config(config)))
