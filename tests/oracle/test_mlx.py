"""Checkpoints that mlx-lm loads, and those that it made: the same weights, logits and tokens in both.

Compared in float32: in bfloat16 MLX's products on a CPU are summed up in bfloat16. mlx and mlx-lm live in an
environment of their own; ``QUANTKIT_TEST_MLX`` names its Python.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from quantkit.checkpoint.engines import check_engine
from quantkit.checkpoint.open import open_checkpoint
from quantkit.export.gpt_oss import export_gpt_oss
from quantkit.export.layouts import export
from quantkit.quantization.run import quantize
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import FAMILIES, tiny_model
from tests.helpers.mlx_peer import ask_mlx, mlx_greedy, mlx_logits, with_mlx

pytestmark = [pytest.mark.oracle, with_mlx]
IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))
BOUND = 1e-3
EMBEDDING_SCALES = {"gemma2": 0.05, "gemma3_text": 0.05}
"""By how much logits may differ where mlx-lm rounds the embedding's factor to bfloat16."""
RECIPE = """rules:
  - {match: "re:model\\\\.embed_tokens|lm_head", optional: true, method: rtn, format: mlx,
     spec: {bits: 6, granularity: {strategy: group, size: 64}}}
  - {match: "*.1.*.o_proj"}
  - {match: "*.down_proj", optional: true, method: rtn, format: mlx,
     spec: {bits: 3, symmetric: false, minimum: true, granularity: {strategy: group, size: 32}}}
  - {match: "*", method: rtn, format: mlx, spec: {bits: 4, granularity: {strategy: group, size: 32}}}
"""
EXPERTS = """rules:
  - {match: "*.experts.*", method: rtn,
     spec: {kind: fp, bits: 4, granularity: {strategy: group, size: 32}, scale_dtype: e8m0}}
  - {match: "*"}
"""
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64}
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village,",
           "To make bread you need")
TOKENS = 64


def written(tmp_path, text: str = RECIPE):
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return str(tmp_path / "recipe.yaml")


def failed(folder) -> dict[str, str]:
    with open_checkpoint(folder) as opened:
        return {check.name: check.detail for check in check_engine("mlx", opened) if check.status == "failed"}


def our_logits(folder) -> np.ndarray:
    with torch.no_grad():
        return load(str(folder), dtype="float32").model(IDS).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mix_of_every_family(tmp_path, family: str) -> None:
    """Symmetric weights and minima, kept layers, the embedding too: what ``verify`` accepts loads there, and
    gives the same logits; what it doesn't, fails there."""
    plain = tiny_model(tmp_path / "plain", family, dtype="float32")
    out = quantize(str(plain), written(tmp_path), tmp_path / "out").out
    if reasons := failed(out):
        with pytest.raises(AssertionError, match="not in model"):
            mlx_logits(tmp_path, out, IDS.numpy())
        assert family in ("qwen3_moe", "gpt_oss") and "experts" in reasons
        return
    theirs, ours = mlx_logits(tmp_path, out, IDS.numpy()), our_logits(out)
    assert ours.std() > 0.5 and np.abs(theirs - ours).max() < EMBEDDING_SCALES.get(family, BOUND)


@pytest.mark.parametrize("truncate", [True, False])
def test_gpt_oss_in_openais_layout(tmp_path, truncate: bool) -> None:
    """Experts in MXFP4; its yarn has no ramp that begins between two dimensions."""
    plain = tiny_model(tmp_path / "plain", "gpt_oss", dtype="float32", tie_word_embeddings=False,
                       rope_scaling={**YARN, "truncate": truncate})
    made = quantize(str(plain), written(tmp_path, EXPERTS), tmp_path / "made").out
    out = export_gpt_oss(str(made), tmp_path / "out").out
    assert list(failed(out)) == ([] if truncate else ["rope"])
    ours = our_logits(out)
    gap = np.abs(mlx_logits(tmp_path, out, IDS.numpy()) - ours).max()
    assert ours.std() > 0.5 and (gap < BOUND) == truncate


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize(("bits", "size", "mix"), [
    (2, 32, ""), (3, 64, ""), (4, 64, ""), (5, 32, ""), (6, 64, ""), (8, 32, ""), (4, 32, "mixed_3_6")])
@pytest.mark.sampled(3)
def test_what_mlx_lm_converts_is_read(tmp_path, family: str, bits: int, size: int, mix: str) -> None:
    plain = tiny_model(tmp_path / "plain", family, dtype="bfloat16", tie_word_embeddings=family != "qwen2")
    theirs = tmp_path / "theirs"
    ask_mlx(tmp_path, "convert", plain=str(plain), folder=str(theirs), bits=bits, size=size, mix=mix)
    gap = np.abs(mlx_logits(tmp_path, theirs, IDS.numpy()) - our_logits(theirs)).max()
    assert gap < EMBEDDING_SCALES.get(family, BOUND)
    with open_checkpoint(theirs) as opened:
        specs = {row.spec for row in opened.layers}
        assert None not in specs and all(spec.minimum for spec in specs)
        assert {spec.bits for spec in specs} == ({3, 6} if mix else {bits})
    assert failed(theirs) == {}
    again = export(str(theirs), "mlx", tmp_path / "again").out
    assert np.array_equal(our_logits(again), our_logits(theirs))


@pytest.mark.parametrize(("family", "change", "name"), [
    ("llama", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope"),
    ("llama", {"tie_word_embeddings": None}, "head"),
    ("qwen3", {"attention_bias": True}, "attention"),
    ("qwen3", {"head_dim": None}, "family"),
    ("gemma3_text", {"sliding_window_pattern": None, "layer_types": ["full_attention"] * 2}, "windows"),
    ("gemma3_text", {"num_attention_heads": 4, "final_logit_softcapping": 1.0}, "attention"),
    ("mixtral", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope")], ids=str)
def test_what_it_reads_otherwise_is_told(tmp_path, family: str, change: dict, name: str) -> None:
    """Each of these models loads there as another one, or not at all."""
    tied = {"tie_word_embeddings": False} if "tie_word_embeddings" in change else {}
    plain = tiny_model(tmp_path / "plain", family, dtype="float32", **change | tied)
    if tied:
        config = json.loads((plain / "config.json").read_text())
        del config["tie_word_embeddings"]
        (plain / "config.json").write_text(json.dumps(config))
    out = quantize(str(plain), written(tmp_path), tmp_path / "out").out
    assert name in failed(out)
    try:
        theirs = mlx_logits(tmp_path, out, IDS.numpy())
    except AssertionError as error:
        assert "mlx_lm" in str(error)
    else:
        assert np.abs(theirs - our_logits(out)).max() > 5 * EMBEDDING_SCALES.get(family, BOUND)


def test_awq_is_read_there(tmp_path) -> None:
    plain = tiny_model(tmp_path / "plain", "llama", dtype="float16")
    text = """rules:
  - {match: "*", method: rtn, format: awq,
     spec: {bits: 4, symmetric: false, granularity: {strategy: group, size: 32}}}
"""
    out = quantize(str(plain), written(tmp_path, text), tmp_path / "out").out
    assert failed(out) == {}
    ours = our_logits(out)
    gap = np.abs(mlx_logits(tmp_path, out, IDS.numpy()) - ours)
    assert gap.max() < 0.2 * ours.std()  # zero points times scales are rounded to float16 there


@pytest.mark.parametrize("minimum", [False, True])
def test_smollm2_gives_the_same_tokens(tmp_path, smollm2, minimum: bool) -> None:
    """Symmetric weights, exported; and minima, made for MLX."""
    form = "format: mlx, spec: {symmetric: false, minimum: true," if minimum else "spec: {"
    text = f"""rules:
  - {{match: lm_head, optional: true}}
  - {{match: "*", method: rtn, {form} bits: 4, granularity: {{strategy: group, size: 64}}}}}}
"""
    out = first = quantize(smollm2, written(tmp_path, text), tmp_path / "ours").out
    if not minimum:
        out = export(str(first), "mlx", tmp_path / "mlx").out
    assert failed(out) == {}
    loaded = load(str(first), dtype="float32")
    prompts = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS]
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    ours = [result.token_ids for result in generate(loaded, prompts, sampling)]
    assert mlx_greedy(tmp_path, out, PROMPTS, TOKENS) == (prompts, ours)
