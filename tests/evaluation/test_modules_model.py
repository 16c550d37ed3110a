"""Families whose mathematics isn't known here, evaluated through transformers' modules."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.run import evaluate
from quantkit.evaluation.settings import EvalSettings
from quantkit.kv.spec import parse_kv
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.modules_model import load_through_modules
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing.tiny import tiny_tokenizer

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers", reason="these families are transformers' (extra: oracle)")

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "cohere2": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
                "logit_scale": 0.25, "tie_word_embeddings": True},  # its logits are scaled behind the head
    "gemma4_text": {"num_kv_shared_layers": 0, "global_head_dim": 32, "vocab_size_per_layer_input": 512,
                    "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
                    "hidden_size_per_layer_input": 16, "num_experts": 4, "top_k_experts": 2,
                    "moe_intermediate_size": 32, "final_logit_softcapping": 5.0}}


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    return build(request.param, tmp_path / "model")


def build(model_type, folder, **own):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **SIZES | FAMILIES[model_type] | own))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder


def recipe(**spec) -> Recipe:
    rule = {"match": "model.layers.*", "method": "rtn", "spec": {
        "bits": 8, "granularity": {"strategy": "channel"}} | spec}
    return Recipe.model_validate({"name": "eight", "rules": [rule]})


def test_logits_are_those_of_transformers(model):
    whole, folder = model
    ids = torch.arange(10, 40)[None]
    loaded = load_through_modules(str(folder), dtype="float32")
    with torch.inference_mode():
        hidden = loaded.model.hidden(ids)
        expected = whole(input_ids=ids, use_cache=False).logits
        assert torch.equal(loaded.model.logits(hidden), expected)
        alone = loaded.model.head_alone()
        assert torch.equal(alone.logits(hidden), expected)
        # fewer rows are added up in another order
        torch.testing.assert_close(loaded.model(ids, last=torch.tensor([7])), expected[:, 7])
        torch.testing.assert_close(alone.logits(hidden[0, 3:9]), expected[0, 3:9])
    assert "transformers 5" in loaded.label
    assert all(parameter.is_meta for name, parameter in alone._modules.network.named_parameters()
               if name.startswith("model."))


def test_heads_of_several_sizes_are_read(tmp_path):
    """As Gemma 4 has them: transformers tells no size that all layers share."""
    whole, folder = build("gemma4_text", tmp_path / "model", global_head_dim=64)
    ids = torch.arange(10, 40)[None]
    loaded = load_through_modules(str(folder), dtype="float32")
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids), whole(ids).logits, rtol=1e-4, atol=1e-4)
    assert loaded.config.num_heads == 0, "no cache of ours holds its keys"


def test_a_checkpoint_is_what_its_file_says(model, tmp_path):
    """Experts one by one, which transformers itself wouldn't read of Gemma 4, among them."""
    _, folder = model
    out = quantize(str(folder), recipe(), tmp_path / "out").out
    quantized, exact = (load_through_modules(str(path), dtype="float32") for path in (out, folder))
    ids = torch.arange(10, 60)[None]
    with torch.inference_mode():
        expected, got = exact.model(ids).log_softmax(-1), quantized.model(ids).log_softmax(-1)
    kl = float((expected.exp() * (expected - got)).sum(-1).mean())
    assert 0 < kl < 0.006 and quantized.bits_per_weight < 10 < exact.bits_per_weight
    result = evaluate([str(folder), str(out)], EvalSettings(window=64, windows=4, dtype="float32"))
    assert 0 < result.rows[1].metrics["kl_mean"].value < 0.006
    assert [row.speed for row in result.rows] == [None, None]
    assert result.rows[0].metrics["perplexity"].value == pytest.approx(perplexity(exact, folder), rel=0.2)


def test_nf4_is_read_by_transformers(model, tmp_path):
    """A tower, or a head, would be quantized too, were all Linears meant."""
    pytest.importorskip("bitsandbytes", reason="it reads NF4 (extra: oracle)")
    from transformers import AutoModelForCausalLM

    whole, folder = model
    if "gemma4" in whole.config.model_type:
        with pytest.raises(QuantkitError, match="nf4") as caught:
            quantize(str(folder), "nf4", tmp_path / "out")
        assert "which bitsandbytes doesn't quantize" in str(caught.value.why)
        return
    out = quantize(str(folder), "nf4", tmp_path / "out").out
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    kinds = {name: type(part).__name__ for name, part in theirs.named_modules()
             if hasattr(part, "in_features")}
    assert kinds.pop("lm_head") == "Linear" and set(kinds.values()) == {"Linear4bit"}
    ids = torch.arange(10, 40)[None]
    with torch.inference_mode():
        ours = load_through_modules(str(out), dtype="float32").model(ids).log_softmax(-1)
        exact, got = (network(input_ids=ids).logits.float().log_softmax(-1) for network in (whole, theirs))
    near, far = ((ours.exp() * (ours - other)).sum(-1).mean() for other in (got, exact))
    assert near < far / 20


def perplexity(loaded, folder) -> float:
    from quantkit.evaluation.quality.score import windows_of
    from quantkit.evaluation.text import BUILTIN, load_text

    windows = windows_of(loaded, load_text(BUILTIN).content, 64, 4)
    with torch.inference_mode():
        rows = loaded.model(windows).log_softmax(-1)
    return float(rows[:, :-1].gather(-1, windows[:, 1:, None]).mean().neg().exp())


def test_what_is_not_measured_is_said(model, tmp_path):
    _, folder = model
    told = []
    evaluate([str(folder)], EvalSettings(window=32, windows=1), announce=told.append)
    assert any("speed isn't measured" in text for text in told)
    with pytest.raises(UsageError, match="--peer"):
        evaluate([str(folder)], EvalSettings(window=32, windows=1, peers=("transformers(x)",)))
    out = quantize(str(folder), recipe(activations="token"), tmp_path / "out").out
    with pytest.raises(UsageError, match="can't be evaluated here") as caught:
        evaluate([str(folder), str(out)], EvalSettings(window=32, windows=1))
    assert "rounds its inputs" in str(caught.value.why)


def test_layers_attend_over_our_cache(model):
    """Windows of 24 tokens in some layers, scores that aren't scaled, heads that share keys."""
    _, folder = model
    loaded = load_through_modules(str(folder), dtype="float32")
    window = torch.arange(10, 110)
    with torch.inference_mode():
        expected = loaded.model.logits(loaded.model.hidden(window[None])[0, 60:])
        far = {}
        for kv in ("none", "int8", "snapkv(0.5)"):
            forced = TeacherForcedModel(loaded, parse_kv(kv), 60)
            logits = loaded.model.logits(forced.hidden(window))
            far[kv] = float((logits - expected).abs().max())
    assert far["none"] < 1e-4 < far["int8"] < far["snapkv(0.5)"]
    result = evaluate([str(folder)], EvalSettings(window=64, windows=2, dtype="float32",
                                                  kv=(parse_kv("none"), parse_kv("int8"))))
    assert [row.kv for row in result.rows] == ["none", "int8"]
    assert result.rows[0].metrics["kl_mean"].value == 0 < result.rows[1].metrics["kl_mean"].value


def test_layers_that_keep_something_else_take_no_cache(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2", **SIZES, layer_types=[
        "conv", "full_attention"])).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match="--kv") as caught:
        evaluate([str(folder)], EvalSettings(window=32, windows=1, kv=(parse_kv("int8"),)))
    assert "something else than keys and values" in str(caught.value.why)


@pytest.mark.parametrize("kv", ["none", "window(1000, sinks=4)"])
def test_continuations_are_scored_as_texts(model, kv):
    from quantkit.evaluation.tasks.scoring import Scorer, ScoringRequest

    whole, folder = model
    loaded = load_through_modules(str(folder), dtype="float32")
    context, continuation = tuple(range(10, 30)), (31, 45, 60)
    [scored] = Scorer(loaded, parse_kv(kv)).score([ScoringRequest(context, continuation)])
    with torch.inference_mode():
        rows = whole(input_ids=torch.tensor([context + continuation]), use_cache=False).logits[0]
    expected = rows.double().log_softmax(-1)[19:22].gather(-1, torch.tensor(continuation)[:, None]).sum()
    assert scored.logprob == pytest.approx(float(expected), rel=1e-5) and not scored.greedy


def test_a_config_that_transformers_refuses_is_an_error(model):
    _, folder = model
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": "many"}))
    with pytest.raises(QuantkitError, match="transformers can't build this model"):
        evaluate([str(folder)], EvalSettings(window=32, windows=1))
