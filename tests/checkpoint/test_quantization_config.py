from __future__ import annotations

import re

import pytest
import torch

from quantkit.checkpoint.quantization_config import config_words, quantization_config, stored_quantization
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import Recipe, Rule
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model


def test_int4_is_word_for_word_what_compressed_tensors_reads(tiny, rules):
    assert quantization_config(tiny.plan(*rules["int4"]).rows) == {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "version": "0.20.0", "global_compression_ratio": None,
        "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": 32, "dynamic": False},
            "input_activations": None, "output_activations": None}}}


def test_channels_have_no_group_size(tiny, rules):
    group = quantization_config(tiny.plan(*rules["int8"]).rows)["config_groups"]["group_0"]
    assert group["weights"] == {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                                "dynamic": False}


@pytest.mark.parametrize(("name", "layout", "kind"), [("w8a8", "int-quantized", "int"),
                                                      ("fp8", "float-quantized", "float")])
def test_activations_are_word_for_word_what_compressed_tensors_reads(tiny, rules, name, layout, kind):
    config = quantization_config(tiny.plan(*rules[name]).rows)
    assert config["format"] == layout and config["ignore"] == ["lm_head"]
    assert config["config_groups"] == {"group_0": {
        "targets": ["Linear"], "format": layout,
        "weights": {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token",
                              "dynamic": True},
        "output_activations": None}}


def test_float_weights_alone_go_by_their_other_name(tiny, rules):
    config = quantization_config(tiny.plan(*rules["fp8-weights"]).rows)
    assert config["format"] == config["config_groups"]["group_0"]["format"] == "naive-quantized"
    assert config["config_groups"]["group_0"]["input_activations"] is None


def test_4_bit_floats_are_word_for_word_what_compressed_tensors_reads(tiny, rules):
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    nvfp4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    mxfp4 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    for name, scales, dynamic in (("nvfp4", nvfp4, None), ("nvfp4-a4", nvfp4, "local"),
                                  ("mxfp4", mxfp4, None), ("mxfp4-a4", mxfp4, True)):
        config = quantization_config(tiny.plan(*rules[name]).rows)
        assert config["format"] == f"{name[:5]}-pack-quantized"
        assert config["config_groups"] == {"group_0": {
            "targets": ["Linear"], "format": config["format"], "weights": weights | scales,
            "input_activations": None if dynamic is None else weights | scales | {"dynamic": dynamic},
            "output_activations": None}}


def test_squares_are_word_for_word_what_compressed_tensors_and_transformers_read(tiny, rules):
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    assert quantization_config(tiny.plan(*rules["fp8-squares"]).rows)["config_groups"] == {"group_0": {
        "targets": ["Linear"], "format": "float-quantized",
        "weights": eight | {"strategy": "block", "block_structure": [32, 32], "dynamic": False},
        "input_activations": eight | {"strategy": "group", "group_size": 32, "dynamic": True},
        "output_activations": None}}
    assert quantization_config(tiny.plan(*rules["fine-grained-fp8"]).rows) == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "modules_to_not_convert": ["lm_head"]}


def test_nf4_is_word_for_word_what_transformers_reads(tiny, rules):
    assert quantization_config(tiny.plan(*rules["nf4-nested"]).rows) == {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
        "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"], "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False}


def test_mlx_is_word_for_word_what_mlx_lm_reads(tiny, rules):
    """Without a ``quant_method``; a layer that is kept isn't named."""
    words = config_words(tiny.plan(*rules["mlx"]).rows)
    six = {"group_size": 32, "bits": 6, "mode": "affine"}
    assert words["quantization"] == words["quantization_config"] == {
        "group_size": 32, "bits": 4, "mode": "affine", "lm_head": six}
    assert stored_quantization(words) == {
        "quant_method": "mlx", "group_size": 32, "bits": 4, "mode": "affine",
        "layers": {"lm_head": six}}
    assert set(config_words(tiny.plan(*rules["int4"]).rows)) == {"quantization_config"}
    assert config_words(tiny.plan({"match": "*"}).rows) == {}


def test_mlx_beside_another_layout_is_ours(tiny, rules):
    rows = tiny.plan({"match": "*.down_proj", **rules["int8"][1]} | {"match": "*.down_proj"},
                     *rules["mlx"]).rows
    assert quantization_config(rows) == {"quant_method": "quantkit"}


def test_several_specs_are_several_groups_that_name_each_layer_once(tiny, rules):
    plan = tiny.plan(*rules["mixed-bits"])
    config = quantization_config(plan.rows)
    assert config["ignore"] == ["model.layers.0.self_attn.k_proj", "lm_head"]
    groups = list(config["config_groups"].values())
    assert [g["weights"]["num_bits"] for g in groups] == [4, 8]
    for row in plan.rows:
        hits = [g["weights"]["num_bits"] for g in groups for t in g["targets"]
                if re.match(t.removeprefix("re:"), row.name)]
        assert hits == ([row.spec.bits] if row.spec else [])


def test_a_quantized_head_is_not_ignored(tiny, rules):
    assert quantization_config(tiny.plan(*rules["int3-asym"]).rows)["ignore"] == []


def test_a_tied_head_is_ignored(make_tiny, rules):
    rows = make_tiny(tied=True).plan(rules["int4"][1]).rows
    assert all(row.name != "lm_head" for row in rows)
    assert quantization_config(rows)["ignore"] == ["lm_head"]


def test_layouts_of_one_standard_can_be_mixed(tiny, rules):
    plan = tiny.plan(*rules["mixed-layouts"])
    config = quantization_config(plan.rows)
    assert config["format"] == "mixed-precision" and config["ignore"] == []
    named = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert named["pack-quantized"] == ["re:^lm_head$"] and len(named["naive-quantized"]) == 2
    assert sum(map(len, named.values())) == len(plan.rows)


def test_what_no_standard_says_is_ours(tiny, rules):
    assert quantization_config(tiny.plan(*rules["mixed-formats"]).rows) == {"quant_method": "quantkit"}


def test_nested_beside_plain_nf4_is_ours(tiny, rules):
    head, nested = rules["nf4-nested"]
    plain = {**nested, "match": "*.up_proj", "spec": {**nested["spec"], "nested": False}}
    assert quantization_config(tiny.plan(head, plain, nested).rows) == {"quant_method": "quantkit"}


def test_nothing_quantized_is_no_config(tiny):
    assert quantization_config(tiny.plan({"match": "*"}).rows) is None


@pytest.mark.sampled(3)
@pytest.mark.oracle
@pytest.mark.parametrize("name", ["int8", "int4", "int3-asym", "mixed-bits", "w8a8", "fp8", "fp8-weights",
                                  "mixed-layouts"])
def test_compressed_tensors_accepts_it(tiny, rules, name):
    """And gives the layout the name that it would choose itself."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    infer = pytest.importorskip("compressed_tensors.compressors.format").infer_module_format
    config = quantization_config(tiny.plan(*rules[name]).rows)
    parsed = quantization.QuantizationConfig.model_validate(config)
    for group in parsed.config_groups.values():
        assert group.format == infer(torch.nn.Linear, group).value
        assert parsed.format == ("mixed-precision" if name == "mixed-layouts" else group.format)
    assert len(parsed.config_groups) == len(config["config_groups"])


@pytest.mark.oracle
def test_transformers_accepts_the_bitsandbytes_one(tiny, rules):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    config = quantization_config(tiny.plan(*rules["nf4-nested"]).rows)
    parsed = transformers.BitsAndBytesConfig.from_dict(config)
    assert parsed.bnb_4bit_use_double_quant and parsed.llm_int8_skip_modules == ["lm_head"]


def test_the_router_beside_experts_is_ignored_once_a_layer(tmp_path):
    recipe = Recipe(name="r", description="", rules=(Rule(match="*", method="rtn", spec=QuantSpec(
        bits=8, granularity=Granularity(strategy="channel"))),))
    for family, module in (("mixtral", "block_sparse_moe"), ("qwen3_moe", "mlp")):
        source = open_source(str(tiny_model(tmp_path / family, family)))
        assert quantization_config(make_plan(recipe, source).rows)["ignore"] == [
            *(f"model.layers.{i}.{module}.gate" for i in range(2)), "lm_head"]


def channel(bits: int, **more) -> dict:
    return {"bits": bits, "granularity": {"strategy": "channel"}, **more}


def test_gptq_is_word_for_word_what_gptqmodel_reads(tiny, rules):
    head, int4 = rules["int4"]
    kept = {"match": "*.0.mlp.up_proj"}
    for form, said in (("gptq", "gptq"), ("gptq-v2", "gptq_v2")):
        assert quantization_config(tiny.plan(head, {**int4, "format": form}).rows, "1.2") == {
            "quant_method": "gptq", "method": "gptq", "format": said, "checkpoint_format": said, "bits": 4,
            "group_size": 32, "sym": True, "desc_act": False, "lm_head": False, "pack_dtype": "int32",
            "meta": {"quantizer": ["quantkit:1.2"]}}
    config = quantization_config(tiny.plan(head, kept, {**int4, "format": "gptq"}).rows)
    (pattern, change), = config["dynamic"].items()
    assert pattern.startswith("-:") and change == {}
    assert re.match(pattern[2:], "model.layers.0.mlp.up_proj")
    assert not re.match(pattern[2:], "model.layers.1.mlp.up_proj")
    whole = quantization_config(tiny.plan({"match": "*", "method": "rtn", "spec": channel(8),
                                           "format": "gptq"}).rows)
    assert whole["group_size"] == -1 and whole["lm_head"] is True


def test_awq_is_word_for_word_what_autoawq_reads(tiny, rules):
    head, int4 = rules["int4"]
    spec = {**int4["spec"], "symmetric": False}
    assert quantization_config(tiny.plan(head, {**int4, "spec": spec, "format": "awq"}).rows) == {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"]}


def test_int8_of_bitsandbytes(tiny):
    rule = {"match": "*.mlp.*", "method": "rtn", "spec": channel(8), "format": "bnb-int8"}
    config = quantization_config(tiny.plan(rule).rows)
    assert config["load_in_8bit"] is config["_load_in_8bit"] is True
    assert config["load_in_4bit"] is config["_load_in_4bit"] is False
    assert len(config["llm_int8_skip_modules"]) == 2 * 5 + 1, "q, k, v, what they are fused into, o; the head"


@pytest.mark.oracle
def test_transformers_accepts_them(tiny, rules):
    transformers = pytest.importorskip("transformers")
    head, int4 = rules["int4"]
    gptq = quantization_config(tiny.plan(head, {**int4, "format": "gptq-v2"}).rows)
    assert transformers.GPTQConfig.from_dict(gptq).format == "gptq_v2"
    awq = quantization_config(tiny.plan(
        head, {**int4, "spec": {**int4["spec"], "symmetric": False}, "format": "awq"}).rows)
    assert transformers.AwqConfig.from_dict(awq).modules_to_not_convert == ["lm_head"]


CHANNEL8 = {"bits": 8, "granularity": {"strategy": "channel"}}
GROUP4 = {"bits": 4, "granularity": {"strategy": "group", "size": 32}}


def with_embedding(make_tiny, tied: bool, embedding: dict, method: str = "rtn", head: dict | None = None):
    rules = [{"match": "model.embed_tokens", "method": method, "spec": embedding},
             {"match": "lm_head", "optional": True, **({"method": "rtn", "spec": head} if head else {})},
             {"match": "*", "method": "rtn", "spec": GROUP4}]
    return quantization_config(make_tiny(tied=tied).plan(*rules).rows)


def test_a_head_is_named_beside_the_class_that_engines_do_not_count_it_to(make_tiny):
    config = quantization_config(make_tiny().plan({"match": "*", "method": "rtn", "spec": CHANNEL8}).rows)
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "re:^lm_head$"]


def test_an_embedding_is_said_by_its_class(make_tiny):
    alike = with_embedding(make_tiny, False, GROUP4)
    assert alike["config_groups"]["group_0"]["targets"] == ["Linear", "Embedding"]
    assert alike["ignore"] == ["lm_head"] and len(alike["config_groups"]) == 1
    other = with_embedding(make_tiny, False, CHANNEL8)["config_groups"]
    assert {group["weights"]["num_bits"]: group["targets"] for group in other.values()} == {
        8: ["Embedding"], 4: ["Linear"]}
    three = with_embedding(make_tiny, False, CHANNEL8, head=CHANNEL8)["config_groups"]
    assert three["group_0"]["targets"] == ["re:^lm_head$", "Embedding"]
    assert all(target.startswith("re:^model") for target in three["group_1"]["targets"])


def test_an_embedding_that_is_the_head_is_said_where_all_layers_are_alike(make_tiny):
    assert with_embedding(make_tiny, True, GROUP4)["config_groups"]["group_0"]["targets"] == [
        "Linear", "Embedding"]
    assert with_embedding(make_tiny, True, CHANNEL8) == {"quant_method": "quantkit"}


def test_an_embedding_beside_layers_of_bitsandbytes_is_said_by_nobody(make_tiny):
    nf4 = {"kind": "nf", "bits": 4, "granularity": {"strategy": "block", "size": 64},
           "scale_dtype": "float32"}
    rules = [{"match": match, "method": "nf4", "spec": nf4} for match in ("model.embed_tokens", "*")]
    assert quantization_config(make_tiny().plan(*rules).rows) == {"quant_method": "quantkit"}
    assert quantization_config(make_tiny().plan(rules[1]).rows)["quant_method"] == "bitsandbytes"


def test_compressed_tensors_itself_reads_it(make_tiny):
    """Their own classes: the config is valid, and the scheme reaches embedding, layers and head."""
    quantization = pytest.importorskip("compressed_tensors.quantization",
                                       reason="compressed-tensors is not installed (extra: oracle)")
    config = with_embedding(make_tiny, False, CHANNEL8, head=GROUP4)
    parsed = quantization.QuantizationConfig.model_validate(
        {key: value for key, value in config.items() if key not in ("sparsity_config", "transform_config")})
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(64, 96, bias=False)
    model.model = torch.nn.Module()
    model.model.embed_tokens = torch.nn.Embedding(96, 64)
    model.model.norm = torch.nn.LayerNorm(64)
    quantization.apply_quantization_config(model, parsed)
    bits = {name: module.quantization_scheme.weights.num_bits for name, module in model.named_modules()
            if hasattr(module, "quantization_scheme")}
    assert bits == {"model.embed_tokens": 8, "lm_head": 4}


@pytest.mark.parametrize("form", ["gptq", "awq", "bnb-int8"])
def test_kept_layers_go_by_the_names_of_what_they_are_fused_into_too(tiny, form):
    bits = 8 if form == "bnb-int8" else 4
    spec = {"bits": bits, "granularity": {"strategy": "channel"}, "symmetric": form != "awq"}
    config = quantization_config(tiny.plan(
        {"match": "lm_head"}, {"match": "*.0.self_attn.[qkv]_proj"}, {"match": "*.1.mlp.up_proj"},
        {"match": "*", "method": "rtn", "spec": spec, "format": form}).rows)
    if form == "gptq":
        patterns = [key[2:] for key in config["dynamic"]]

        def kept(name):
            return any(re.match(pattern, name) for pattern in patterns)
    else:
        names = config["modules_to_not_convert" if form == "awq" else "llm_int8_skip_modules"]
        kept = names.__contains__
    assert kept("model.layers.0.self_attn.qkv_proj") and kept("model.layers.0.self_attn.k_proj")
    assert not kept("model.layers.0.mlp.gate_up_proj") and not kept("model.layers.1.self_attn.qkv_proj")
    assert kept("model.layers.1.mlp.up_proj") and not kept("model.layers.1.mlp.gate_up_proj")


def test_mixtrals_experts_go_by_the_names_that_engines_ask_for_too(tmp_path):
    source = open_source(str(tiny_model(tmp_path / "model", "mixtral", tie_word_embeddings=False)))
    rules = [{"match": "lm_head", "method": "rtn", "spec": channel(8)},
             {"match": "*", "method": "rtn", "spec": channel(4)}]
    rows = make_plan(Recipe.model_validate({"name": "t", "rules": rules}), source).rows
    groups = quantization_config(rows)["config_groups"].values()
    (targets,) = [group["targets"] for group in groups if group["weights"]["num_bits"] == 4]
    place = "model.layers.0.block_sparse_moe.experts.0."
    for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"):
        assert sum(bool(re.match(target[3:], place + name)) for target in targets) == 1, name
