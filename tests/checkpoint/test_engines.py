"""Which engine loads what: each rule that ``docs/layouts.yaml`` doesn't break is broken here, once."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.engines import ENGINES, VERSIONS, check_engine, check_layers
from quantkit.checkpoint.open import open_checkpoint
from quantkit.checkpoint.quantization_config import config_words
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import CheckpointError, UsageError
from quantkit.testing import tiny_model
from tests.helpers.shapes import recipe

CHANNEL = {"strategy": "channel"}
TENSOR = {"bits": 8, "granularity": {"strategy": "tensor"}}
NF4 = {"kind": "nf", "bits": 4, "granularity": {"strategy": "block", "size": 64}, "scale_dtype": "float32"}
W8A8 = {"bits": 8, "granularity": CHANNEL, "activations": "token"}
FP8 = W8A8 | {"kind": "fp"}
NVFP4 = {"kind": "fp", "bits": 4, "granularity": {"strategy": "group", "size": 16}, "scale_dtype": "e4m3"}
A = {"activations": "group"}
FINE = "fine-grained-fp8"
EMBEDDING = "model.embed_tokens"


def spec(bits: int, size: int | None = 32, **more) -> dict:
    granularity = CHANNEL if size is None else {"strategy": "group", "size": size}
    return {"bits": bits, "granularity": granularity, **more}


def zeros(bits: int, size: int | None = 32) -> dict:
    return spec(bits, size, symmetric=False)


def squares(size: int) -> dict:
    return {"kind": "fp", "bits": 8, "granularity": {"strategy": "tile", "size": size}}


def rule(spec: dict | None, form: str | None = None, match: str = "*") -> dict:
    """Of a recipe; without a spec layers are kept."""
    if spec is None:
        return {"match": match}
    return {"match": match, "method": "nf4" if spec.get("kind") == "nf" else "rtn", "spec": spec,
            **({"format": form} if form else {})}


HEAD = {"match": "lm_head", "optional": True}
MLX = rule(spec(4, symmetric=False, minimum=True), "mlx")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """``told(engine, device, *rules, family=…, status=…, …)`` → checks of that status by name, of a tiny
    model with this config by these rules. Nothing is quantized. Queries have 64 rows, keys and values 32,
    gate and up 128."""
    sources = {}

    def call(engine, device, *rules, family="llama", status="failed", without=(), **config) -> dict[str, str]:
        key = json.dumps([family, config])
        if key not in sources:
            own_head = {"tie_word_embeddings": False} if family == "llama" else {}
            sources[key] = open_source(str(tiny_model(tmp_path_factory.mktemp("model") / "tiny", family,
                                                      **own_head | config)))
        source = sources[key]
        text = {"windows": 2, "window": 32}
        rows = [row.recorded() for row in make_plan(recipe(*rules, calibration=text), source).rows]
        words = {name: value for name, value in {**source.config(), **config_words(rows)}.items()
                 if name not in without}
        checks = check_layers(engine, words, rows, device)
        assert all(check.detail for check in checks)
        return {check.name: check.detail for check in checks if check.status == status}

    return call


@pytest.mark.parametrize(("engine", "device", "rules", "name", "words"), [
    ("vllm", "cuda", [rule(spec(4, 16))], "kernel on cuda", ": group size 16"),
    ("vllm", "cuda", [rule(spec(3))], "kernel on cuda", "humming"),
    ("vllm", "cuda", [rule(TENSOR)], "strategy", "one scale a tensor"),
    ("vllm", "cuda", [rule(squares(48) | A)], "inputs", "in_features 64 is no multiple of the 48"),
    ("vllm", "cuda", [rule(squares(64) | A)], "fused rows", "k_proj: out_features 32 is no multiple of 64"),
    ("vllm", "cpu", [rule(squares(32) | A, FINE)], "kernel on cpu", "takes those of 128"),
    ("vllm", "cpu", [rule(NVFP4)], "kernel on cpu", "for GPUs"),
    ("vllm", "cpu", [rule(spec(8, None), "gptq")], "kernel on cpu", "4-bit weights only"),
    ("sglang", "cuda", [rule(spec(4))], "kernel on cuda", "[64, 128] or [128, 64]"),
    ("sglang", "cuda", [rule(zeros(4), "awq")], "kernel on cuda", "[64, 128]"),
    ("sglang", "cuda", [rule(squares(48) | A, FINE)], "inputs", "in_features 64"),
    ("sglang", "cuda", [rule(squares(64) | A, FINE)], "fused rows", "k_proj"),
    ("transformers", "cpu", [rule(squares(48) | A)], "inputs", "in_features 64"),
    ("transformers", "cpu", [rule(squares(48) | A, FINE)], "squares", "[64, 64] isn't whole squares of 48"),
    ("transformers", "cpu", [rule(None, match="*.0.mlp.down_proj"), rule(spec(4), "gptq")], "kept layers",
     "0.mlp.down_proj: is kept"),
    ("mlx", "cpu", [rule(zeros(4, None), "awq")], "groups", "groups are 32, 64, 128"),
    ("mlx", "cpu", [rule(spec(4))], "quant_method", "quantkit export DIR --to mlx OUT"),
    ("vllm", "cuda", [rule(spec(8, None), match="*.1.self_attn.k_proj"), rule(spec(4))], "fused layers",
     "layers.1.self_attn.k_proj: is int8 channel sym"),
    ("vllm", "cuda", [rule(None, match="*.0.mlp.up_proj"), rule(spec(4), "gptq")], "fused layers",
     "mlp.up_proj: is kept"),
    ("sglang", "cuda", [rule(None, match="*.0.self_attn.q_proj"), rule(NF4)], "fused layers",
     "q_proj is kept: fused"),
    *((engine, "cuda", [rule(NF4, match="*.mlp.*"), rule(spec(4))], "quant_method", "not quantkit")
      for engine in ENGINES)], ids=str)
def test_checkpoints_that_an_engine_refuses(told, engine, device, rules, name, words):
    assert words in told(engine, device, HEAD, *rules)[name]


@pytest.mark.parametrize(("engine", "device", "rules"), [
    ("vllm", "cuda", [rule(None, match="*.0.mlp.down_proj"), rule(spec(4), "gptq")]),
    ("vllm", "cpu", [rule(TENSOR | W8A8)]), ("vllm", "cuda", [rule(squares(32))]),
    ("sglang", "cuda", [rule(None, match="*.0.self_attn.[qkv]_proj"), rule(NF4)]),
    ("transformers", "cpu", [rule(squares(32))]), ("transformers", "cpu", [rule(squares(256) | A, FINE)]),
    ("mlx", "cuda", [rule(spec(4), "mlx")]), ("mlx", "cpu", [rule(zeros(4), "awq")])], ids=str)
def test_what_loads(told, engine, device, rules):
    assert told(engine, device, HEAD, *rules) == {}


@pytest.mark.parametrize("inexact", [zeros(4), spec(7), spec(8, None), W8A8, FP8], ids=str)
def test_no_export_to_mlx_is_offered_that_would_round(told, inexact):
    assert told("mlx", "cpu", HEAD, rule(inexact))["quant_method"].endswith("not compressed-tensors")


@pytest.mark.parametrize("other", [zeros(8), spec(8, None), zeros(4, 64), W8A8], ids=str)
def test_no_option_loads_zero_points_among_several_schemes(told, other):
    words = told("transformers", "cpu", HEAD, rule(other, match="*.down_proj"), rule(zeros(4)))["zero points"]
    assert "no option loads these" in words and "with symmetric: true" in words
    assert "CompressedTensors" not in words


def test_zero_points_beside_kept_layers_are_of_one_scheme(told):
    words = told("transformers", "cpu", HEAD, rule(None, match="*.down_proj"), rule(zeros(4)))["zero points"]
    assert "CompressedTensorsConfig(dequantize=True)" in words


@pytest.mark.parametrize(("device", "what", "noted"), [
    ("cpu", W8A8, True), ("cuda", W8A8, False), ("cpu", FP8, False), ("cpu", spec(4, 64), False)], ids=str)
def test_w8a8_on_a_cpu_runs_in_bfloat16(told, device, what, noted):
    notes = told("vllm", device, HEAD, rule(what), status="note")
    assert ("--dtype bfloat16" in notes.get("dtype", "")) is noted


def test_sglang_runs_other_gptq_in_float16_and_awq_on_cpus_with_amx(told):
    notes = told("sglang", "cuda", HEAD, rule(spec(3), "gptq"), status="note", dtype="float16")
    assert "float16 activations" in notes["GPTQ's bits"]
    assert "AMX" in told("sglang", "cpu", HEAD, rule(zeros(4), "awq"), status="note")["kernel on cpu"]


@pytest.mark.parametrize(("family", "change", "name", "words"), [
    ("llama", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope",
     "the base 10000, not 500000"),
    ("llama", {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4,
                                                         "factor": 2.0}}, "rope", "not be scaled"),
    ("mixtral", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope", "ignores rope_scaling"),
    ("gemma3_text", {"rope_local_base_freq": None, "rope_theta": 1e5, "rope_parameters": {
        "sliding_attention": {"rope_theta": 5e3}, "full_attention": {"rope_theta": 1e5}}}, "rope",
     "the base 10000, not 5000"),
    ("phi3", {"original_max_position_embeddings": 256, "rope_scaling": {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}, "rope",
     "needs 'type'"),
    ("llama", {"tie_word_embeddings": ...}, "head", "takes true for it"),
    ("gemma2", {"tie_word_embeddings": False}, "head", "no head beside the embedding"),
    ("qwen3", {"attention_bias": True}, "attention", "no biases"),
    ("qwen2", {"head_dim": 32}, "attention", "heads are 32 wide"),
    ("gemma2", {"final_logit_softcapping": None}, "attention", "always caps"),
    ("gemma3_text", {"final_logit_softcapping": 1.0}, "attention", "ignores final_logit_softcapping"),
    ("qwen3", {"head_dim": None}, "family", "lacks head_dim"),
    ("gemma3_text", {"sliding_window_pattern": None, "layer_types": ["full_attention"] * 2}, "windows",
     "but every 6th")], ids=str)
def test_what_mlx_lm_reads_otherwise(told, family, change, name, words):
    without = [key for key, value in change.items() if value is ...]
    given = {key: False if value is ... else value for key, value in change.items()}
    assert words in told("mlx", "cuda", HEAD, MLX, family=family, without=without, **given)[name]


@pytest.mark.parametrize(("family", "runs"), [("sdar", ["sglang"]), ("a2d-qwen3", [])])
def test_who_writes_blocks(told, family, runs):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    refused = [engine for engine in ENGINES
               if "writes no blocks" in told(engine, "cuda", HEAD, rule(W8A8), family=family, **heads).get(
                   "model", "")]
    assert refused == [engine for engine in ENGINES if engine not in runs]


def test_mlx_lm_notes_windows_that_it_ignores(told):
    notes = told("mlx", "cuda", MLX, family="mistral", status="note", sliding_window=100)
    assert "more than 100 tokens" in notes["windows"]


def test_experts_of_a_layer_share_a_scheme(told):
    def failed(engine, *rules, family="qwen3_moe"):
        return told(engine, "cuda", HEAD, *rules, family=family)

    rest = rule(spec(8, None))
    words = failed("vllm", rule(spec(4), match="*.experts.1.*"), rest)["fused layers"]
    assert "experts.1." in words and "is int4" in words and "experts.0." in words
    assert "fused layers" in failed("sglang", rule(None, match="*.experts.*.down_proj"), rest)
    assert "fused layers" not in failed("vllm", rule(None, match="*.1.mlp.experts.*"), rest)
    assert "only plain experts" in failed("mlx", MLX)["experts"]
    assert failed("mlx", rule(None, match="*.experts.*"), MLX) == {}
    assert "is an expert by bnb-nf4" in failed("transformers", rule(NF4))["experts"]
    assert failed("transformers", rule(None, match="*.experts.*"), rule(NF4)) == {}
    words = failed("transformers", rule(spec(8), match="*.1.mlp.experts.*"), rule(spec(4)))["experts"]
    assert "layers.1.mlp.experts.0." in words and "transformers reads all experts of a model by one" in words
    assert failed("transformers", rule(spec(8), match="*.experts.*"), rule(spec(4))) == {}
    assert "experts" not in failed("mlx", MLX, family="mixtral")
    words = failed("mlx", rule(None, match="*.1.*.experts.2.w2"), MLX, family="mixtral")["experts"]
    assert "layers.1.block_sparse_moe.experts.*.w2: experts of a projection share a scheme" in words


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_quantized_head_of_transformers(told, form):
    what = spec(4) if form == "gptq" else zeros(4)
    failed = told("transformers", "cuda", rule(what, form), vocab_size=320)
    assert list(failed) == ["head"] and "random weights" in failed["head"]


def test_a_head_in_squares(told):
    words = told("sglang", "cuda", rule(squares(32) | A))["kernel for floats"]
    assert words.startswith("lm_head") and "strategy channel" in words


@pytest.mark.parametrize(("engine", "device", "what", "words"), [
    ("vllm", "cuda", spec(8, None), None), ("vllm", "cuda", spec(4), None), ("vllm", "cuda", spec(2), None),
    ("vllm", "cpu", spec(4), "is for GPUs"), ("vllm", "cuda", spec(3), "2, 4 or 8 bits"),
    ("vllm", "cuda", zeros(4), "symmetric integers"), ("vllm", "cuda", TENSOR, "tensor"),
    ("vllm", "cuda", {"kind": "fp", "bits": 8, "granularity": CHANNEL}, "by float-quantized"),
    ("sglang", "cuda", spec(4), "takes plain ones only"),
    ("transformers", "cpu", spec(4), "only with quantization_config=CompressedTensorsConfig(dequantize"),
    ("transformers", "cpu", spec(8, None), "only where all layers are of one scheme")], ids=str)
def test_a_quantized_embedding(told, engine, device, what, words):
    failed = told(engine, device, HEAD, rule(what, match=EMBEDDING), rule(spec(4)))
    if words is None:
        assert failed == {}
    else:
        assert failed["embedding"].startswith(EMBEDDING) and words in failed["embedding"]


def test_an_embedding_that_is_the_head(told):
    for engine, words in (("vllm", "is the head too"), ("transformers", "dequantize=True")):
        failed = told(engine, "cuda", rule(spec(4), match=EMBEDDING), rule(spec(4)), tie_word_embeddings=True)
        assert list(failed) == ["embedding"] and words in failed["embedding"]
    for engine in ("vllm", "sglang", "transformers"):
        failed = told(engine, "cuda", rule(spec(8, None), match=EMBEDDING), rule(spec(4)),
                      tie_word_embeddings=True)
        assert "not quantkit" in failed["quant_method"]


# -- of checkpoints as they lie there

def test_usage(tiny, tmp_path):
    assert VERSIONS.keys() == ENGINES.keys()
    out = tiny.write(tmp_path / "out", {"match": "*"})
    with open_checkpoint(out) as opened:
        assert [check.status for check in check_engine("vllm", opened)] == ["ok"]
        with pytest.raises(UsageError, match="no engine is called 'vlm'"):
            check_engine("vlm", opened)
        with pytest.raises(UsageError, match="no device is called 'tpu'"):
            check_engine("vllm", opened, "tpu")


def change_config(folder, change) -> None:
    """Another tool's checkpoint: no manifest, and another ``quantization_config``."""
    (folder / "quantkit.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def test_bytes_whose_inputs_are_not_rounded(tiny, tmp_path):
    """As others write W8A16 now and then; here it is read as pack-quantized, which engines can't do."""
    out = tiny.write(tmp_path / "out", {"match": "lm_head"}, rule(W8A8))
    change_config(out, lambda words: words["config_groups"]["group_0"].update(input_activations=None))
    with open_checkpoint(out) as opened:
        for engine in ("vllm", "sglang"):
            (check,) = [check for check in check_engine(engine, opened) if "no kernel" in check.detail]
            assert check.status == "failed" and check.name == "layout" and "group_0" in check.detail
        assert all(check.status != "failed" for check in check_engine("transformers", opened))


def test_another_tools_order(tiny, tmp_path):
    out = tiny.write(tmp_path / "out", {"match": "lm_head"}, rule(spec(4), "gptq"))
    change_config(out, lambda words: words.update(desc_act=True))
    with open_checkpoint(out) as opened:
        failed = [check for check in check_engine("vllm", opened) if check.status == "failed"]
    assert [check.name for check in failed] == ["desc_act"]


@pytest.mark.parametrize("value", ["aaaa", [1], {"bits": 4}, {"quant_method": ["gptq"]}])
def test_a_quantization_config_that_is_no_table(tiny, tmp_path, value):
    out = tiny.write(tmp_path / "out", {"match": "lm_head"}, rule(spec(4)))
    config = json.loads((out / "config.json").read_text())
    size = (out / "config.json").stat().st_size
    text = json.dumps(config | {"quantization_config": value})
    (out / "config.json").write_text(text + " " * (size - len(text)))
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        open_checkpoint(out)
    assert [check.name for check in verify(out).failed] == ["config.json"]


@pytest.mark.parametrize("suffix", ["weight_global_scale", "input_global_scale"])
def test_fused_layers_must_share_global_scales(tmp_path, suffix):
    model = tiny_model(tmp_path / "model", tie_word_embeddings=False)
    (tmp_path / "r.yaml").write_text(json.dumps({"calibration": {"windows": 2, "window": 32},
                                                 "rules": [HEAD, rule(NVFP4 | A)]}))
    folder = quantize(str(model), str(tmp_path / "r.yaml"), tmp_path / "out").out
    (folder / "quantkit.json").unlink()
    stored = load_file(folder / "model.safetensors")
    stored[f"model.layers.1.self_attn.k_proj.{suffix}"] *= 2
    stored[f"model.layers.0.mlp.down_proj.{suffix}"] *= torch.tensor(3.0)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with open_checkpoint(folder) as opened:
        for engine in ("vllm", "sglang"):
            (fault,) = [check.detail for check in check_engine(engine, opened) if check.status == "failed"]
            assert "layers.1.self_attn.k_proj: has global scales" in fault and "more)" not in fault
        assert all(check.status != "failed" for check in check_engine("transformers", opened))


def test_the_card_says_how_to_load(tmp_path):
    model = tiny_model(tmp_path / "model", tie_word_embeddings=False)
    (tmp_path / "r.yaml").write_text(json.dumps({"rules": [HEAD, rule(squares(32) | A, FINE)]}))
    text = (quantize(str(model), str(tmp_path / "r.yaml"), tmp_path / "out").out / "README.md").read_text()
    assert "vllm serve" in text and "pip install transformers accelerate" in text
