from __future__ import annotations

from quantkit.checkpoint.card import model_card
from quantkit.checkpoint.manifest import CalibrationFacts, ExportRecord, SourceRecord
from quantkit.checkpoint.quantization_config import stored_quantization
from quantkit.checkpoint.reader import Checkpoint


def card(tiny, manifest, method=None):
    quantized = {"quantization_config": {"quant_method": method}} if method else {}
    return model_card(manifest, tiny.source.config() | quantized).decode()


def test_it_says_what_from_what_and_how_to_load(written):
    folder, _, rules = written
    with Checkpoint.open(folder) as checkpoint:
        text = (folder / "README.md").read_text()
        assert f"{checkpoint.manifest.bits_per_weight:.3f}" in text
        method = stored_quantization(checkpoint.config())["quant_method"]
    assert "# tiny, quantized by recipe `tiny`" in text and "quantkit generate" in text
    assert ("from transformers" in text) == (method not in ("quantkit", "mlx"))
    assert ("mlx_lm.generate" in text) == (method == "mlx")
    assert ("vllm serve" in text) == (method in ("compressed-tensors", "gptq", "awq", "fp8"))
    assert ("--dtype float16" in text) == (method in ("gptq", "awq"))
    asymmetric = method == "compressed-tensors" and any(
        not rule.get("spec", {}).get("symmetric", True) for rule in rules)
    assert ("dequantize=True" in text) == asymmetric
    assert ("only quantkit reads it" in text) == (method == "quantkit")


def test_the_hubs_head_names_the_base_model_only_for_hub_sources(tiny, rules):
    manifest = tiny.manifest(tiny.plan(*rules["int4"]))
    assert "base_model" not in card(tiny, manifest, "compressed-tensors")
    hub = manifest.model_copy(update={"source": SourceRecord(kind="hub", uri="hf:o/n", revision="abc")})
    text = card(tiny, hub, "compressed-tensors")
    assert text.startswith("---\n") and "base_model: o/n\n" in text and "revision `abc`" in text


def test_calibration_and_fallbacks_are_told(tiny, rules, tmp_path):
    with Checkpoint.open(tiny.write(tmp_path / "out", *rules["int4"])) as checkpoint:
        manifest = checkpoint.manifest
    rows = (manifest.layers[0].model_copy(update={"notes": ("damping raised to 0.1",)}), *manifest.layers[1:])
    facts = CalibrationFacts(text="builtin", windows=2, window=8, seed=3, tokens=16, sha256="0" * 64)
    text = card(tiny, manifest.model_copy(update={"layers": rows, "calibration": facts}))
    assert "16 tokens of `builtin` (2 windows of 8, seed 3)" in text
    assert f"- `{rows[0].name}`: damping raised to 0.1" in text


def test_where_it_came_from(tiny, rules):
    manifest = tiny.manifest(tiny.plan(*rules["int4"]))
    told = card(tiny, manifest, "compressed-tensors")
    assert "packed from" not in told and "1 files are in `quantkit.json`" in told and "quantkit 0" in told
    assert '"match": "lm_head"' in told.split("## Recipe")[1]
    record = ExportRecord(uri="tiny-int4", quant_method="compressed-tensors", formats=("pack-quantized",),
                          manifest_sha256="a" * 64)
    told = card(tiny, manifest.model_copy(update={"exported": record}), "gptq")
    assert "packed from: `tiny-int4` (pack-quantized, compressed-tensors)" in told and "a" * 64 in told


def test_transformers_is_left_out_where_it_would_make_up_weights(tiny, rules, tmp_path):
    rule = {"match": "*", "method": "rtn", "format": "gptq", "spec": rules["int4"][-1]["spec"]}
    told = (tiny.write(tmp_path / "whole", {"match": "lm_head"}, rule) / "README.md").read_text()
    assert "from transformers" in told
    kept = {"match": "*.0.mlp.down_proj"}
    told = (tiny.write(tmp_path / "out", {"match": "lm_head"}, kept, rule) / "README.md").read_text()
    assert "from transformers" not in told and "vllm serve" in told


def test_a_quantized_embedding_is_dequantized_by_transformers(tiny, rules, tmp_path):
    table = {"match": "model.embed_tokens", "method": "rtn", "spec": rules["int4"][-1]["spec"]}
    told = (tiny.write(tmp_path / "out", table, *rules["int4"]) / "README.md").read_text()
    assert "from transformers" in told and "dequantize=True" in told
