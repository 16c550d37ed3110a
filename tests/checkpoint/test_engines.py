"""Which engine loads what: each rule is broken once, and named with the layer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from quantkit.checkpoint.engines import check_engine, check_layers
from quantkit.checkpoint.open import open_checkpoint
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError, UsageError
from quantkit.testing import tiny_model

CHANNEL = {"strategy": "channel"}


def spec(bits: int, size: int | None = 32, **more) -> dict:
    granularity = CHANNEL if size is None else {"strategy": "group", "size": size}
    return {"bits": bits, "granularity": granularity, **more}


@pytest.fixture
def said(tiny, tmp_path):
    """``said(engine, device, spec, format, *rules before)`` → failed checks by name."""
    count = iter(range(99))

    def call(engine, device, spec, form=None, *before) -> dict[str, str]:
        method = "nf4" if spec.get("kind") == "nf" else "rtn"
        rule = {"match": "*", "method": method, "spec": spec, **({"format": form} if form else {})}
        out = tiny.write(tmp_path / f"out{next(count)}", {"match": "lm_head"}, *before, rule)
        with open_checkpoint(out) as opened:
            checks = check_engine(engine, opened, device)
        assert all(check.detail for check in checks)
        return {check.name: check.detail for check in checks if check.status == "failed"}

    return call


NF4 = {"kind": "nf", "bits": 4, "granularity": {"strategy": "block", "size": 64}, "scale_dtype": "float32"}


W8A8 = spec(8, None, activations="token")
FP8 = W8A8 | {"kind": "fp"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("engine", "device", "what", "form"), [
    ("vllm", "cuda", spec(4), None), ("vllm", "cuda", spec(8, None), None),
    ("vllm", "cpu", spec(4, 64), None), ("vllm", "cpu", W8A8, None), ("vllm", "cpu", FP8, None),
    ("vllm", "cuda", W8A8, None),
    ("vllm", "cuda", FP8, None), ("sglang", "cuda", W8A8, None), ("sglang", "cuda", FP8, None),
    ("transformers", "cpu", W8A8, None), ("transformers", "cpu", FP8, None),
    ("vllm", "cpu", W8A8 | {"granularity": {"strategy": "tensor"}}, None),
    ("vllm", "cuda", spec(4, symmetric=False), None), ("vllm", "cpu", spec(4, symmetric=False), None),
    ("vllm", "cuda", spec(8, None), "gptq"), ("vllm", "cpu", spec(4), "gptq"),
    ("vllm", "cuda", spec(4), "gptq-v2"),
    ("vllm", "cuda", spec(4, symmetric=False), "awq"), ("sglang", "cuda", NF4, None),
    ("transformers", "cpu", NF4, None), ("transformers", "cpu", spec(4), None),
    ("transformers", "cpu", spec(8, None), "bnb-int8"), ("transformers", "cpu", spec(3), "gptq"),
    ("transformers", "cuda", spec(4, symmetric=False), "awq"), ("transformers", "cpu", spec(2), "gptq-v2"),
    ("sglang", "cuda", spec(4), "gptq")], ids=str)
def test_what_loads(said, engine, device, what, form):
    assert said(engine, device, what, form) == {}


@pytest.mark.parametrize("other", [
    spec(8, symmetric=False), spec(8, None), spec(4, 64, symmetric=False), W8A8], ids=str)
def test_no_option_loads_zero_points_among_several_schemes(said, other):
    rule = {"match": "*.down_proj", "method": "rtn", "spec": other}
    found = said("transformers", "cpu", spec(4, symmetric=False), None, rule)["zero points"]
    assert "no option loads these" in found and "with symmetric: true" in found
    assert "CompressedTensors" not in found


def test_zero_points_beside_kept_layers_are_of_one_scheme(said):
    found = said("transformers", "cpu", spec(4, symmetric=False), None, {"match": "*.down_proj"})
    assert "CompressedTensorsConfig(dequantize=True)" in found["zero points"]


@pytest.mark.parametrize(("device", "what", "noted"), [
    ("cpu", W8A8, True), ("cuda", W8A8, False), ("cpu", FP8, False), ("cpu", spec(4, 64), False)], ids=str)
def test_w8a8_on_a_cpu_runs_in_bfloat16(tiny, tmp_path, device, what, noted):
    out = tiny.write(tmp_path / "out", {"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": what})
    with open_checkpoint(out) as opened:
        notes = {check.name: check.detail for check in check_engine("vllm", opened, device)
                 if check.status == "note"}
    assert ("--dtype bfloat16" in notes.get("dtype", "")) is noted


@pytest.mark.parametrize(("engine", "device", "what", "form", "name", "words"), [
    ("vllm", "cpu", spec(8, None), None, "kernel on cpu", "4-bit weights only"),
    ("vllm", "cpu", FP8 | {"activations": None}, None, "kernel on cpu", "without fp8 activations"),
    ("sglang", "cpu", W8A8, None, "kernel on cpu", "GPUs"),
    ("vllm", "cpu", spec(8, None), "gptq", "kernel on cpu", "4-bit weights only"),
    ("vllm", "cuda", spec(3), None, "kernel on cuda", "humming"),
    ("vllm", "cuda", spec(8, None, symmetric=False), None, "kernel on cuda", "8 bits symmetric"),
    ("vllm", "cuda", spec(4, 16), None, "kernel on cuda", "group size 16"),
    ("vllm", "cuda", spec(4, symmetric=False), "gptq", "GPTQ's bits", "symmetric"),
    ("vllm", "cuda", spec(3), "gptq", "GPTQ's bits", "4 or 8 bits"),
    ("vllm", "cuda", {"bits": 8, "granularity": {"strategy": "tensor"}}, None, "strategy", "a tensor"),
    ("vllm", "cuda", NF4, None, "quant_method", "plugin"),
    ("vllm", "cuda", spec(8, None), "bnb-int8", "quant_method", "plugin"),
    ("sglang", "cpu", spec(4), None, "kernel on cpu", "for GPUs"),
    ("sglang", "cuda", spec(4), None, "kernel on cuda", "[64, 128] or [128, 64]"),
    ("sglang", "cuda", spec(4, symmetric=False), "awq", "kernel on cuda", "[64, 128]"),
    ("sglang", "cuda", spec(3), "gptq", "GPTQ's bits", "float16 activations"),
    ("transformers", "cpu", spec(4, symmetric=False), None, "zero points", "dequantize=True")], ids=str)
def test_checkpoints_that_an_engine_refuses(said, engine, device, what, form, name, words):
    found = said(engine, device, what, form)
    assert words in found[name]
    if name != "quant_method":
        assert "layers" in found[name] or "kernels" in found[name]


MLX = spec(4, symmetric=False, minimum=True)


def test_mlx_lm_reads_its_own_layout_and_awq(said):
    assert said("mlx", "cpu", MLX, "mlx") == {} == said("mlx", "cuda", spec(4), "mlx")
    assert said("mlx", "cpu", spec(4, symmetric=False), "awq") == {}
    assert "groups are 32, 64, 128" in said("mlx", "cpu", spec(4, None, symmetric=False), "awq")["groups"]
    assert said("mlx", "cpu", spec(4))["quant_method"].endswith("quantkit export DIR --to mlx OUT")
    for inexact in (spec(4, symmetric=False), spec(7), spec(8, None), W8A8, FP8):
        assert said("mlx", "cpu", inexact)["quant_method"].endswith("not compressed-tensors")
    for engine in ("vllm", "sglang", "transformers"):
        assert "not mlx" in said(engine, "cuda", MLX, "mlx")["quant_method"]


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
def test_what_mlx_lm_reads_otherwise(tmp_path, family, change, name, words):
    given = {key: False if value is ... and key.startswith("tie") else value for key, value in change.items()
             if value is not ... or key.startswith("tie")}
    source = tiny_model(tmp_path / "model", family, **given)
    rule = {"match": "*", "method": "rtn", "format": "mlx", "spec": MLX}
    (tmp_path / "r.yaml").write_text("rules: " + json.dumps([{"match": "lm_head", "optional": True}, rule]))
    with open_checkpoint(quantize(str(source), str(tmp_path / "r.yaml"), tmp_path / "out").out) as opened:
        config = {key: value for key, value in opened.config().items() if change.get(key) is not ...}
        failed = {check.name: check.detail for check in check_layers("mlx", config, opened.layers)
                  if check.status == "failed"}
    assert words in failed[name]


def test_mlx_lm_puts_experts_of_mixtral_together_where_they_share_a_scheme(tmp_path):
    source = tiny_model(tmp_path / "model", "mixtral")
    rule = {"match": "*", "method": "rtn", "format": "mlx", "spec": MLX}
    for number, before in enumerate(([], [{"match": "*.1.*.experts.2.w2"}])):
        (tmp_path / "r.yaml").write_text("rules: " + json.dumps([*before, rule]))
        out = quantize(str(source), str(tmp_path / "r.yaml"), tmp_path / f"out{number}").out
        with open_checkpoint(out) as opened:
            (check,) = [check for check in check_engine("mlx", opened) if check.name == "experts"]
        assert check.status == ("failed" if before else "ok")
    assert "layers.1.block_sparse_moe.experts.*.w2: experts of a projection share a scheme" in check.detail


def test_mlx_lm_notes_windows_that_it_ignores(tmp_path):
    source = tiny_model(tmp_path / "model", "mistral", sliding_window=100)
    rule = {"match": "*", "method": "rtn", "format": "mlx", "spec": MLX}
    (tmp_path / "r.yaml").write_text("rules: " + json.dumps([rule]))
    with open_checkpoint(quantize(str(source), str(tmp_path / "r.yaml"), tmp_path / "out").out) as opened:
        (check,) = [check for check in check_engine("mlx", opened) if check.name == "windows"]
    assert check.status == "note" and "more than 100 tokens" in check.detail


def test_fused_layers_share_a_scheme(said):
    other = {"match": "*.1.self_attn.k_proj", "method": "rtn", "spec": spec(8, None)}
    found = said("vllm", "cuda", spec(4), None, other)
    assert "layers.1.self_attn.k_proj: is int8 channel sym" in found["fused layers"]
    kept = {"match": "*.0.mlp.up_proj"}
    assert "mlp.up_proj: is kept" in said("vllm", "cuda", spec(4), "gptq", kept)["fused layers"]
    assert said("vllm", "cuda", spec(4), "gptq", {"match": "*.0.mlp.down_proj"}) == {}


def test_sglang_fuses_in_bitsandbytes_too(said):
    kept = {"match": "*.0.self_attn.q_proj"}
    assert "q_proj is kept: fused" in said("sglang", "cuda", NF4, None, kept)["fused layers"]
    assert said("sglang", "cuda", NF4, None, {"match": "*.0.self_attn.[qkv]_proj"}) == {}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("mixture") / "model", "qwen3_moe")


def test_experts_of_a_layer_share_a_scheme(mixture, tmp_path):
    def failed(engine, *rules):
        recipe = tmp_path / f"{engine}.yaml"
        recipe.write_text("rules: " + json.dumps([{"match": "lm_head", "optional": True}, *rules]))
        out = quantize(str(mixture), str(recipe), tmp_path / f"out-{recipe.stem}").out
        with open_checkpoint(out) as opened:
            found = check_engine(engine, opened)
        shutil.rmtree(out)
        return {check.name: check.detail for check in found if check.status == "failed"}

    rest = {"match": "*", "method": "rtn", "spec": spec(8, None)}
    one = {"match": "*.experts.1.*", "method": "rtn", "spec": spec(4)}
    found = failed("vllm", one, rest)["fused layers"]
    assert "experts.1." in found and "is int4" in found and "experts.0." in found
    assert "fused layers" in failed("sglang", {"match": "*.experts.*.down_proj"}, rest)
    assert "fused layers" not in failed("vllm", {"match": "*.1.mlp.experts.*"}, rest)
    mlx = {"match": "*", "method": "rtn", "format": "mlx", "spec": MLX}
    assert "only plain experts" in failed("mlx", mlx)["experts"]
    assert failed("mlx", {"match": "*.experts.*"}, mlx) == {}
    nf4 = {"match": "*", "method": "nf4", "spec": NF4}
    assert "is an expert by bnb-nf4" in failed("transformers", nf4)["experts"]
    assert failed("transformers", {"match": "*.experts.*"}, nf4) == {}


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_quantized_head_of_transformers(tiny, tmp_path, form):
    rule = {"match": "*", "method": "rtn", "format": form, "spec": spec(4, symmetric=form == "gptq")}
    with open_checkpoint(tiny.write(tmp_path / "out", rule)) as opened:
        failed = [check for check in check_engine("transformers", opened) if check.status == "failed"]
        assert opened.config()["quantization_config"]["lm_head"] is True
    assert [check.name for check in failed] == ["head"] and "random weights" in failed[0].detail


def test_bytes_whose_inputs_are_not_rounded(tiny, tmp_path):
    """As others write W8A16 now and then; here it is read as pack-quantized, which engines can't do."""
    out = tiny.write(tmp_path / "out", {"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": W8A8})
    (out / "quantkit.json").unlink()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (out / "config.json").write_text(json.dumps(config))
    with open_checkpoint(out) as opened:
        for engine in ("vllm", "sglang"):
            (check,) = [one for one in check_engine(engine, opened) if "no kernel" in one.detail]
            assert check.status == "failed" and check.name == "layout" and "group_0" in check.detail
        assert all(one.status != "failed" for one in check_engine("transformers", opened))


def test_gptq_in_float16_of_sglang(make_tiny, tmp_path):
    out = make_tiny(dtype=torch.float16).write(
        tmp_path / "out", {"match": "lm_head"},
        {"match": "*", "method": "rtn", "format": "gptq", "spec": spec(3)})
    with open_checkpoint(out) as opened:
        (check,) = [one for one in check_engine("sglang", opened) if one.name == "GPTQ's bits"]
    assert check.status == "note" and "float16 activations" in check.detail


def test_awq_on_a_cpu_of_sglang(tiny, tmp_path):
    out = tiny.write(tmp_path / "out", {"match": "lm_head"},
                     {"match": "*", "method": "rtn", "format": "awq", "spec": spec(4, symmetric=False)})
    with open_checkpoint(out) as opened:
        (check,) = [one for one in check_engine("sglang", opened, "cpu") if "kernel" in one.name]
    assert (check.name, check.status) == ("kernel on cpu", "note") and "AMX" in check.detail


def test_optimum_expects_whole_blocks(said):
    found = said("transformers", "cpu", spec(4), "gptq", {"match": "*.0.mlp.down_proj"})
    assert "0.mlp.down_proj" in found["kept layers"] and "random" in found["kept layers"]


def test_a_mix_that_no_standard_says(said):
    nf = {"match": "*.mlp.*", "method": "nf4", "spec": NF4}
    for engine in ("vllm", "sglang", "transformers"):
        assert "not quantkit" in said(engine, "cuda", spec(4), None, nf)["quant_method"]


def test_another_tools_checkpoint_and_order(tiny, tmp_path):
    out = tiny.write(tmp_path / "out", {"match": "lm_head"},
                     {"match": "*", "method": "rtn", "spec": spec(4), "format": "gptq"})
    (out / "quantkit.json").unlink()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (out / "config.json").write_text(json.dumps(config))
    with open_checkpoint(out) as opened:
        failed = [check for check in check_engine("vllm", opened) if check.status == "failed"]
    assert [check.name for check in failed] == ["desc_act"]


def test_usage(tiny, tmp_path):
    out = tiny.write(tmp_path / "out", {"match": "*"})
    with open_checkpoint(out) as opened:
        assert [c.status for c in check_engine("vllm", opened)] == ["ok"]
        with pytest.raises(UsageError, match="no engine is called 'vlm'"):
            check_engine("vlm", opened)
        with pytest.raises(UsageError, match="no device is called 'tpu'"):
            check_engine("vllm", opened, "tpu")


@pytest.mark.parametrize("value", ["aaaa", [1], {"bits": 4}, {"quant_method": ["gptq"]}])
def test_a_quantization_config_that_is_no_table(tiny, tmp_path, value):
    out = tiny.write(tmp_path / "out", {"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": spec(4)})
    config = json.loads((out / "config.json").read_text())
    size = (out / "config.json").stat().st_size
    text = json.dumps(config | {"quantization_config": value})
    (out / "config.json").write_text(text + " " * (size - len(text)))
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        open_checkpoint(out)
    assert [check.name for check in verify(out).failed] == ["config.json"]


TABLE = {"match": "model.embed_tokens", "method": "rtn"}


@pytest.mark.parametrize(("engine", "device", "what", "words"), [
    ("vllm", "cuda", spec(8, None), None), ("vllm", "cuda", spec(4), None), ("vllm", "cuda", spec(2), None),
    ("vllm", "cpu", spec(4), "is for GPUs"), ("vllm", "cuda", spec(3), "2, 4 or 8 bits"),
    ("vllm", "cuda", spec(4, symmetric=False), "symmetric integers"),
    ("vllm", "cuda", {"bits": 8, "granularity": {"strategy": "tensor"}}, "tensor"),
    ("vllm", "cuda", {"kind": "fp", "bits": 8, "granularity": CHANNEL}, "by float-quantized"),
    ("sglang", "cuda", spec(4), "takes plain ones only"),
    ("transformers", "cpu", spec(4), "only with quantization_config=CompressedTensorsConfig(dequantize"),
    ("transformers", "cpu", spec(8, None), "only where all layers are of one scheme")], ids=str)
def test_a_quantized_embedding(said, engine, device, what, words):
    found = said(engine, device, spec(4), None, {**TABLE, "spec": what})
    if words is None:
        assert found == {}
    else:
        assert found["embedding"].startswith("model.embed_tokens") and words in found["embedding"]


@pytest.mark.parametrize(("engine", "words"),
                         [("vllm", "is the head too"), ("transformers", "dequantize=True")])
def test_an_embedding_that_is_the_head(make_tiny, tmp_path, engine, words):
    out = make_tiny(tied=True).write(tmp_path / "out", {**TABLE, "spec": spec(4)},
                                     {"match": "*", "method": "rtn", "spec": spec(4)})
    with open_checkpoint(out) as opened:
        failed = {check.name: check.detail for check in check_engine(engine, opened)
                  if check.status == "failed"}
    assert list(failed) == ["embedding"] and words in failed["embedding"]


def test_an_embedding_that_no_standard_says(make_tiny, tmp_path):
    out = make_tiny(tied=True).write(tmp_path / "out", {**TABLE, "spec": spec(8, None)},
                                     {"match": "*", "method": "rtn", "spec": spec(4)})
    with open_checkpoint(out) as opened:
        for engine in ("vllm", "sglang", "transformers"):
            (check,) = check_engine(engine, opened)
            assert check.status == "failed" and "not quantkit" in check.detail
