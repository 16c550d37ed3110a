"""How a config finds its family, and the list of tensors that follows from it."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.architecture import linear_slots, parse_config, tensor_shapes
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import UnsupportedModelError
from quantkit.testing import FAMILIES, tiny_weights


def test_an_unknown_family_lists_the_known_ones(make_config):
    known = r"'qwen4'\nknown: .*gemma3, .*llama, .*mimo, ministral, mistral"
    with pytest.raises(UnsupportedModelError, match=known):
        parse_config(make_config("qwen3", model_type="qwen4"))


@pytest.mark.parametrize(("change", "drop", "suggested"), [
    ({}, (), True), ({"model_type": None}, (), True),
    # Ernie has the keys and tensors of Llama and another rope
    ({"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"]}, (), False),
    ({"architectures": None}, (), False), ({"partial_rotary_factor": 0.5}, (), False),
    ({"num_hidden_layers": 3}, (), False), ({}, ("model.norm.weight",), False)])
def test_another_family_is_suggested_if_all_of_the_model_fits_it(make_config, change, drop, suggested):
    config = make_config("llama")
    infos = {name: TensorInfo(name, tuple(tensor.shape), tensor.dtype)
             for name, tensor in tiny_weights(config).items() if name not in drop}
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(config | {"model_type": "lama"} | change, infos)
    assert ("did you mean 'llama'?" in caught.value.why) == suggested


@pytest.mark.parametrize("value", [None, 3, ["llama"]])
def test_a_model_type_that_is_no_name(make_config, value):
    with pytest.raises(UnsupportedModelError):
        parse_config(make_config("llama", model_type=value))


def test_another_head_is_refused(make_config):
    with pytest.raises(UnsupportedModelError, match="LlamaForSequenceClassification"):
        parse_config(make_config("llama", architectures=["LlamaForSequenceClassification"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_are_the_models_linears_in_order(make_config, make_model, family):
    for tied in (True, False):
        config = make_config(family, tie_word_embeddings=tied)
        model, slots = make_model(config), linear_slots(parse_config(config))
        assert [s.name for s in slots] == list(model.linears())
        assert all(model.linears()[s.name].shape == (s.out_features, s.in_features) for s in slots)
        assert (slots[-1].name == "lm_head") != tied
        assert slots[-1].layer == (1 if tied else None)


def test_layers_that_see_one_input_share(make_config):
    groups: dict[str, list[str]] = {}
    for slot in linear_slots(parse_config(make_config("llama", tie_word_embeddings=False))):
        groups.setdefault(slot.shares, []).append(slot.name.rsplit(".", 1)[-1])
    assert list(groups.values()) == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"],
                                     ["down_proj"]] * 2 + [["lm_head"]]


def test_experts_share_nothing_but_their_own_input(make_config):
    groups: dict[str, list[str]] = {}
    for slot in linear_slots(parse_config(make_config("mixtral", num_hidden_layers=1))):
        groups.setdefault(slot.shares, []).append(".".join(slot.name.split(".")[4:]))
    each = [[[f"experts.{i}.w1", f"experts.{i}.w3"], [f"experts.{i}.w2"]] for i in range(4)]
    assert list(groups.values()) == [["q_proj", "k_proj", "v_proj"], ["o_proj"],
                                     *(group for expert in each for group in expert)]


def test_fused_projections_stay_one(make_config):
    slots = linear_slots(parse_config(make_config("phi3", num_hidden_layers=1)))
    assert [(slot.name.rsplit(".", 1)[-1], slot.out_features, slot.in_features) for slot in slots] == [
        ("qkv_proj", 64 + 2 * 32, 64), ("o_proj", 64, 64), ("gate_up_proj", 256, 64), ("down_proj", 64, 128)]
    assert len({slot.shares for slot in slots}) == 4


@pytest.mark.parametrize(("family", "keys"), [
    ("llama", {"attention_bias": True, "mlp_bias": True}), ("mistral", {"tie_word_embeddings": False}),
    ("qwen2", {}), ("qwen3", {"tie_word_embeddings": False}), ("phi3", {}), ("gemma2", {}),
    ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}), ("mixtral", {}),
    ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True})])
def test_a_model_reads_exactly_the_tensors_that_are_listed(make_config, family, keys):
    config = make_config(family, **keys)
    weights, read = tiny_weights(config), []
    source = Weights(lambda n: read.append(n) or weights[n], weights.__contains__, torch.float32)
    CausalLM(parse_config(config), source)
    assert sorted(read) == sorted(tensor_shapes(parse_config(config)))
