from __future__ import annotations

import pytest
import torch

from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import CalibrationSpec, Recipe, load_recipe
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import RecipeError, SourceError, UsageError
from tests.helpers.shapes import (
    CHANNEL8,
    GROUP4,
    HEAD,
    HIDDEN,
    INTER,
    LAYERS,
    NF4,
    PER_LAYER,
    TOKENIZER,
    VOCAB,
    Source,
    every,
    recipe,
)


def refused(rules: Recipe, source: Source | None = None) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        make_plan(rules, source or Source())
    return caught.value


def test_bytes_by_hand():
    plan = make_plan(recipe({"match": "lm_head"}, every()), Source())
    q, head = plan.rows[0], plan.rows[-1]
    assert (q.name, q.shape, q.layer) == ("model.layers.0.self_attn.q_proj", (64, 64), 0)
    assert q.bytes_before == 64 * 64 * 2
    assert q.bytes_after == 64 * 64 + 64 * 2 + 2 * 8  # codes, bf16 scales, the int64 shape
    assert (q.method, q.format, q.dtype) == ("rtn", "pack-quantized", "bfloat16")
    assert (head.name, head.layer, head.method, head.format, head.spec) == ("lm_head", None, None, None, None)
    assert head.bytes_before == head.bytes_after == VOCAB * HIDDEN * 2 and head.bits == 16
    assert plan.other_bytes == 2 * (VOCAB * HIDDEN + HIDDEN + LAYERS * 2 * HIDDEN)
    assert plan.disk_bytes == plan.other_bytes + sum(r.bytes_after for r in plan.rows)
    assert len(plan.rows) == 7 * LAYERS + 1 and "model.norm.weight" in plan.other


def test_a_width_that_a_format_refuses_takes_the_fallback():
    rule = {"match": "*", "method": "rtn", "format": "gguf-q4_k"}
    message = str(refused(recipe({"match": "lm_head"}, rule)))
    assert "blocks of 256, which don't divide in_features 64" in message
    plan = make_plan(recipe({"match": "lm_head"}, rule | {"fallback": "gguf-q5_0"}), Source())
    assert {row.format for row in plan.rows if row.method} == {"gguf-q5_0"}
    assert plan.rows[0].spec == registry("formats").get("gguf-q5_0").spec
    assert plan.rows[0].bytes_after == 64 * 2 * 22


def test_kept_layers_count_with_their_own_bits():
    assert make_plan(recipe(every(None, {}) | {"spec": None}), Source()).bits_per_weight == 16
    half = make_plan(recipe({"match": "*.down_proj"}, {"match": "lm_head"}, every()), Source())
    weights = LAYERS * PER_LAYER + VOCAB * HIDDEN
    kept = LAYERS * HIDDEN * INTER + VOCAB * HIDDEN
    scales = sum(16 * r.shape[0] + 128 for r in half.rows if r.method)
    assert half.bits_per_weight == pytest.approx((16 * kept + 8 * (weights - kept) + scales) / weights)


def test_the_first_matching_rule_decides_and_unmatched_layers_are_kept():
    plan = make_plan(recipe({"match": "*.q_proj", "method": "rtn", "spec": GROUP4},
                            {"match": "*.layers.1.*", "method": "nf4", "spec": NF4}), Source())
    got = {row.name: row.method and row.spec.label() for row in plan.rows}
    assert got["model.layers.1.self_attn.q_proj"] == "int4 g32 sym"
    assert got["model.layers.1.mlp.up_proj"] == "nf4 b64"
    assert got["model.layers.2.mlp.up_proj"] is None and got["lm_head"] is None
    assert {r.format for r in plan.rows} == {"pack-quantized", "bnb-nf4", None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_follow_the_models_dtype(dtype):
    row = make_plan(recipe(every()), Source(dtype=dtype)).rows[0]
    assert row.spec.scale_dtype == str(dtype).removeprefix("torch.") == row.dtype
    assert row.bytes_after == 64 * 64 + 64 * dtype.itemsize + 16


def test_tied_embeddings_have_no_head_and_are_counted_once():
    norms = 2 * (HIDDEN + LAYERS * 2 * HIDDEN)
    for name, outside in (("int8", ["model.embed_tokens"]), ("w8a8", [])):
        plan = make_plan(load_recipe(name), Source(tied=True))
        assert [row.name for row in plan.rows if row.layer is None] == outside
        assert "lm_head.weight" not in plan.other
        assert plan.other_bytes == norms + (0 if outside else 2 * VOCAB * HIDDEN)


# -- refusals


def test_a_group_that_does_not_divide_is_refused_for_every_layer_with_a_remedy():
    spec = {"bits": 4, "granularity": {"strategy": "group", "size": 48}}
    error = refused(recipe(every(spec=spec)))
    inner = 6 * LAYERS + 1  # in_features 64 of all but down_proj (96 = 2 · 48)
    assert f"{inner} of {7 * LAYERS + 1} layers are refused" in error.what
    lines = error.why.splitlines()
    assert len(lines) == 6 and lines[-1] == f"and {inner - 5} more"
    assert "model.layers.0.self_attn.q_proj" in lines[0] and "48" in lines[0] and "64" in lines[0]
    assert "32" in lines[0], "a size that would do"
    assert "down_proj" not in error.why and error.next


def test_a_rule_that_matches_nothing():
    error = refused(recipe({"match": "*.upproj"}, every()))
    assert "rule 1" in error.what and "matches no layer" in error.what
    assert "did you mean '*.up_proj'?" in error.why
    make_plan(recipe({"match": "*.upproj", "optional": True}, every()), Source())


def test_a_rule_that_is_never_reached():
    error = refused(recipe(every(), {"match": "*.up_proj"}))
    assert "rule 2" in error.what and "never reached" in error.what and "rule 1" in error.why
    make_plan(recipe(every(), {"match": "*.up_proj", "optional": True}), Source())


@pytest.mark.parametrize("rule, said", [
    (every("gtpq"), "no method is called 'gtpq'; did you mean 'gptq'?"),
    (every("nf4"), "nf4 produces nf, not int"),
    (every("rtn", NF4), "rtn produces fp or fp tiles or fp4 or int"),
    (every(format="pack-quantised"), "no format is called 'pack-quantised'; did you mean 'pack-quantized'?"),
    (every(format="bnb-nf4"), "bnb-nf4 holds NF4"),
    (every(options={"dampening": 1}), "method rtn has no option 'dampening'"),
    (every("gptq", options={"damp": "much"}), "option 'damp' of method gptq"),
    (every(spec={**CHANNEL8, "scale_dtype": "float32"}), "scale_dtype: model"),
])
def test_refusals_before_any_work(rule, said):
    error = refused(recipe({"match": "lm_head"}, rule))
    assert said in error.why and f"{7 * LAYERS} of" in error.what


def test_a_calibrated_method_takes_the_head_too():
    plan = make_plan(recipe(every("gptq", GROUP4)), Source())
    assert plan.rows[-1].name == "lm_head" and plan.rows[-1].method == "gptq" and plan.calibrated
    assert make_plan(recipe(every("gptq", GROUP4)), Source(tied=True)).calibrated


TABLE = {"match": "model.embed_tokens", "method": "rtn", "spec": CHANNEL8}


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_is_a_row_of_its_own(tied):
    before = make_plan(recipe({"match": "lm_head", "optional": True}, every()), Source(tied=tied))
    plan = make_plan(recipe(TABLE, {"match": "lm_head", "optional": True}, every()), Source(tied=tied))
    row, stored = plan.rows[0], VOCAB * HIDDEN + VOCAB * 2 + 16
    assert (row.name, row.layer, row.shape) == ("model.embed_tokens", None, (VOCAB, HIDDEN))
    assert (row.bytes_before, row.bytes_after) == (VOCAB * HIDDEN * 2, stored)
    assert plan.rows[1:] == before.rows and plan.bits_per_weight == before.bits_per_weight
    assert "model.embed_tokens.weight" not in plan.other and plan.other == before.other[1:]
    assert plan.disk_bytes == before.disk_bytes - VOCAB * HIDDEN * 2 + stored
    assert [row.name == "lm_head" for row in plan.rows].count(True) == (not tied)


@pytest.mark.parametrize("match", ["*", "model.*", "re:.*", "*tokens"])
def test_only_a_rule_that_names_the_embedding_takes_it(match):
    plan = make_plan(recipe({**TABLE, "match": match, "optional": True}), Source())
    assert all(row.name != "model.embed_tokens" for row in plan.rows)
    assert "model.embed_tokens.weight" in plan.other


@pytest.mark.parametrize("match", ["model.embed_tokens", "*.embed_tokens", r"re:model\.embed_tokens|lm_head"])
def test_a_rule_that_names_it_may_be_a_pattern(match):
    assert make_plan(recipe({**TABLE, "match": match}, every()), Source()).rows[0].method == "rtn"


def test_a_kept_embedding_is_no_row():
    plan = make_plan(recipe({"match": "model.embed_tokens"}, TABLE | {"optional": True}, every()), Source())
    assert plan.rows[0].layer == 0 and "model.embed_tokens.weight" in plan.other


@pytest.mark.parametrize("tied, change, said", [
    (False, {"method": "gptq"}, "give it a data-free method (nf4, rtn)"),
    (True, {"spec": {**CHANNEL8, "activations": "token"}}, "a spec without activations"),
    (True, {"spec": {**CHANNEL8, "rotation": "hadamard"}}, "a spec without rotation"),
    (True, {"spec": GROUP4, "format": "gptq"}, "format gptq can't give single rows; use one that can (bnb"),
    (True, {"spec": {"bits": 4, "granularity": {"strategy": "group", "size": 48}}}, "48 doesn't divide"),
    (True, {"method": "nf4"}, "nf4 produces nf")])
def test_what_an_embedding_can_not_be(tied, change, said):
    error = refused(recipe(TABLE | change, {"match": "*"}), Source(tied=tied))
    assert "1 of" in error.what and error.why.startswith("model.embed_tokens: ") and said in error.why


def test_an_embedding_that_is_the_head_may_be_calibrated():
    plan = make_plan(recipe(TABLE | {"method": "gptq"}, {"match": "*"}), Source(tied=True))
    assert plan.calibrated and plan.rows[0].shares == "lm_head"


@pytest.mark.parametrize("rules", [[every()], [HEAD, every()], [every(None, {}) | {"spec": None}]])
def test_tensors_that_could_not_be_loaded(rules):
    source = Source()
    source.changed = {
        "lm_head.weight": None,
        "model.layers.9.mlp.up_proj.weight": TensorInfo("x", (INTER, HIDDEN), torch.bfloat16),
        "model.layers.1.mlp.up_proj.weight": TensorInfo("x", (HIDDEN, INTER), torch.bfloat16),
        "model.layers.2.mlp.up_proj.weight": TensorInfo("x", (INTER, HIDDEN), torch.int8),
        "model.norm.weight": TensorInfo("x", (7,), torch.bfloat16)}
    with pytest.raises(SourceError) as caught:
        make_plan(recipe(*rules), source)
    missing, unused, shape, dtype, norm = caught.value.why.splitlines()
    assert missing == "it lacks the tensor 'lm_head.weight'"
    assert unused == "it holds a tensor that nothing uses: 'model.layers.9.mlp.up_proj.weight'"
    assert shape.endswith("up_proj.weight has shape [64, 96], by config.json [96, 64]")
    assert "torch.int8" in dtype and norm == "tensor model.norm.weight has shape [7], by config.json [64]"


def test_a_dtype_that_only_kept_layers_may_have():
    source = Source(dtype=torch.float64)
    assert "method: null" in refused(recipe(every()), source).why
    make_plan(recipe(every(None, {}) | {"spec": None}), source)


@pytest.mark.parametrize("files,why", [
    ({}, "no tokenizer.json"), ({"tokenizer.json": b"{}"}, "can't be read"),
    ({"tokenizer.json": TOKENIZER, "generation_config.json": b"["}, "generation_config.json is not JSON")])
def test_a_tokenizer_that_could_not_be_loaded(monkeypatch, files, why):
    monkeypatch.setattr(Source, "side_files", lambda self: files)
    with pytest.raises(SourceError, match=why):
        make_plan(recipe(every()), Source())


def test_a_dtype_of_the_config_that_could_not_be_loaded():
    source = Source()
    source.settings = {"torch_dtype": "float8"}
    with pytest.raises(SourceError, match="has dtype 'float8'"):
        make_plan(recipe(every()), source)


def test_a_kv_setting_that_could_not_be_used():
    with pytest.raises(UsageError, match="'nothing'"):
        make_plan(recipe(every(), kv="nothing"), Source())


# -- predictions


def test_options_are_filled_in_for_the_record():
    row = make_plan(recipe(HEAD, every("gptq", GROUP4)), Source()).rows[0]
    assert row.options == registry("methods").get("gptq").options().model_dump(mode="json") != {}


def test_calibration_is_filled_in_only_when_needed():
    assert make_plan(recipe(every()), Source()).recipe.calibration is None
    plan = make_plan(recipe(HEAD, every("gptq", GROUP4)), Source())
    assert plan.recipe.calibration == CalibrationSpec() and plan.calibrated
    own = make_plan(recipe(HEAD, every("gptq", GROUP4), calibration={"windows": 2}), Source())
    assert own.recipe.calibration.windows == 2


def test_a_strangers_method_plans_like_our_own(monkeypatch):
    class Knob(MethodOptions):
        knob: int = 3

    def quantize(weight, stats: LayerStats | None, spec, options):
        raise AssertionError("a plan does no work")

    table = registry("methods")
    method = Method("odd", "https://example.org", quantize, options=Knob,
                    check=lambda spec: "only 5 bits, honestly" if spec.bits != 5 else None)
    table.register("odd", method, owner="stranger")
    try:
        spec = {"bits": 5, "granularity": {"strategy": "channel"}}
        row = make_plan(recipe(every("odd", spec, options={"knob": 4})), Source()).rows[0]
        assert (row.method, row.options) == ("odd", {"knob": 4})
        assert "only 5 bits, honestly" in refused(recipe(every("odd"))).why
        wrong = recipe(every("odd", spec, options={"nob": 4}))
        assert "has no option 'nob'; did you mean 'knob'" in refused(wrong).why
    finally:
        table.drop_owner("stranger")


def test_a_layout_decides_what_scales_are_rounded_to():
    for form, dtype in (("gptq", "float16"), ("gptq-v2", "float16"), ("bnb-int8", "float32"),
                        ("pack-quantized", "bfloat16")):
        rows = make_plan(recipe({"match": "lm_head"}, every(format=form)), Source()).rows
        assert {row.spec.scale_dtype for row in rows if row.spec} == {dtype}, form
    said = make_plan(recipe({"match": "lm_head"}, every(spec={**CHANNEL8, "scale_dtype": "bfloat16"},
                                                        format="bnb-int8")), Source())
    assert said.rows[0].spec.scale_dtype == "bfloat16"


@pytest.mark.parametrize("other", [{"spec": GROUP4}, {"spec": {**CHANNEL8, "bits": 4}, "format": "gptq"},
                                   {"spec": CHANNEL8}])
def test_what_one_quantization_config_can_not_say_is_refused(other):
    error = refused(recipe({"match": "*.down_proj", "method": "rtn", **other}, {"match": "lm_head"},
                           every(format="gptq")))
    assert "no quantization_config can say" in error.what and "gptq int8 channel sym" in error.why
    assert "down_proj" in error.why and "one spec" in error.next
