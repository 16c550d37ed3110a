"""Models with experts as one program: what torch's operators give, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.decoder import CausalLM
from quantkit.ops.stored_weight import PlainWeight
from quantkit.quantization.run import quantize
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.drafting.base import parse_drafter
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model

FAMILIES = {"mixtral": {"intermediate_size": 51, "head_dim": 32},
            "qwen2_moe": {"moe_intermediate_size": 51, "shared_expert_intermediate_size": 70},
            "qwen3_moe": {"moe_intermediate_size": 96, "mlp_only_layers": [0], "norm_topk_prob": False},
            "gpt_oss": {"intermediate_size": 192, "head_dim": 32, "hidden_size": 36}}
"""Sizes that fill no vector, a layer without experts, shares of all experts' softmax, an expert of all."""
MIXED = """
name: mixed
rules:
  - match: "*experts.1.*"
    method: rtn
    spec: {bits: 8, granularity: {strategy: channel}}
  - match: "*experts*"
    method: rtn
    spec: {bits: 4, granularity: {strategy: group, size: 32}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(family, recipe=None, dtype="float32", **keys)`` → the model, loaded."""
    def make(family, recipe=None, dtype="float32", **keys):
        folder = tmp_path_factory.mktemp(family) / "model"
        tiny_model(folder, family, dtype=dtype, **FAMILIES[family] | keys)
        if recipe is not None:
            folder = quantize(str(folder), recipe, folder.parent / "out", calibration=None).out
        loaded = load(str(folder))
        assert isinstance(loaded.model, CpuModel) and loaded.fallback_reason is None
        return loaded

    return make


def ids(*shape, seed=0):
    return torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(loaded, tokens, cuts, kv="none", model=None):
    """Of sequences whose tokens come in pieces."""
    cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
    rows = [cache.add() for _ in tokens]
    return torch.cat([(model or loaded.model)(piece, cache=Batch(cache, rows)).float()
                      for piece in tokens.split(cuts, 1)], 1)


@pytest.mark.parametrize("kv", ["none", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_what_torch_does(made, family, kv):
    loaded, tokens = made(family), ids(2, 90)
    expected = logits(loaded, tokens, [60, 1, 29], kv, loaded.model._model)
    ours = logits(loaded, tokens, [60, 1, 29], kv)
    assert isinstance(loaded.model._model, CausalLM) and expected.std() > 0.1
    # a key may round to the other of two neighboring codes
    assert (ours - expected).abs().max() <= (1e-4 if kv == "none" else 5e-3) * expected.abs().max()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("recipe", [None, "int8", "int4-rtn", "int2", "nf4", "w8a8", "fp8", "mxfp4-datafree",
                                    "nvfp4-datafree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_weight(made, family, recipe):
    sizes = {"qwen2_moe": ["moe_intermediate_size", "shared_expert_intermediate_size"],
             "qwen3_moe": ["moe_intermediate_size"]}.get(family, [])
    keys = {"hidden_size": 64, **dict.fromkeys(["intermediate_size", *sizes], 192)}
    loaded, tokens = made(family, recipe, "bfloat16", **keys), ids(3, 70)
    expected, ours = loaded.model._model(tokens).float(), loaded.model(tokens)
    # where two experts are nearly as likely, a token may get the other one
    errors = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < (0.12 if recipe in ("w8a8", "fp8") else 0.03)
    for kv in ("none", "int8"):
        pieces = logits(loaded, tokens, [33, 1, 1, 35], kv)
        assert torch.equal(pieces[1], logits(loaded, tokens[1:2], [70], kv)[0])
        assert kv != "none" or torch.equal(pieces, ours)


@pytest.mark.parametrize("keys", [{"num_experts": 2, "num_experts_per_tok": 1},
                                  {"num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": True}])
def test_an_expert_may_get_more_rows_than_a_product_takes_at_once(made, keys):
    loaded, tokens = made("qwen3_moe", **keys), ids(6, 100)
    together = loaded.model(tokens)
    assert torch.equal(torch.cat([loaded.model(row[None]) for row in tokens]), together)
    expected = loaded.model._model(tokens)
    assert (together - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_of_equals_the_first_are_chosen(made):
    loaded = made("mixtral", num_local_experts=6)
    for layer in loaded.model._model.layers:
        layer.mlp.router.weight = PlainWeight(torch.zeros(6, 64)).packed(torch.float32)
    tokens = ids(1, 20)
    expected, ours = loaded.model._model(tokens), CpuModel(loaded.model._model)(tokens)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("part", ["router", "down"])
def test_a_broken_weight_shows(made, part):
    loaded = made("gpt_oss")
    assert torch.isfinite(loaded.model(ids(1, 4))).all()
    mixture = loaded.model._model.layers[0].mlp
    for linear in [mixture.router] if part == "router" else [expert.down_proj for expert in mixture.experts]:
        broken = torch.zeros(linear.shape)
        broken[1, 2] = float("nan")
        linear.weight = PlainWeight(broken).packed(torch.float32)
    assert torch.isfinite(loaded.model(ids(1, 4))).all()  # its program keeps the weights that it was made of
    assert not torch.isfinite(CpuModel(loaded.model._model)(ids(1, 4))).any()


@pytest.mark.parametrize("kv", ["none", "snapkv(0.5, window=4)", "h2o(200)", "window(100, sinks=2)+int8",
                                "rotation(4)"])
def test_scores_of_no_key_count_for_every_cache_and_length(made, kv):
    """Also where a sequence's splits are shared out to threads, and where policies ask for weights."""
    loaded, tokens = made("gpt_oss", max_position_embeddings=2048), ids(1, 800)
    caches, rows = [], []
    with torch.inference_mode():
        for model in (loaded.model, loaded.model._model):
            cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
            row, ours = cache.add(), []
            for piece in tokens.split([790, *[1] * 10], 1):
                batch = Batch(cache, [row], "decode" if ours else "prefill_end")
                ours.append(model(piece, batch.next_positions(piece.shape[1]), batch).float())
            caches.append(cache.slots(row))
            rows.append(torch.cat(ours, 1))
    assert caches[0] == caches[1]
    assert (rows[0] - rows[1]).norm() <= 0.01 * rows[1].norm()


@pytest.mark.usefixtures("always_drafted")
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token(made, family):
    loaded = made(family, "int8", "bfloat16", hidden_size=64)
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    prompts = [ids(1, 6, seed=seed)[0].tolist() * 3 for seed in range(3)]
    plain = generate(loaded, prompts, sampling)
    drafted = generate(loaded, prompts, sampling, drafter=parse_drafter("ngram"))
    assert [text.token_ids for text in drafted] == [text.token_ids for text in plain]
    assert sum(text.accepted_tokens for text in drafted) > 10


def test_the_high_halves_of_their_weights_draft_too(made):
    loaded, tokens = made("qwen3_moe", "int8", "bfloat16"), ids(1, 30)
    before = loaded.model(tokens)
    high = loaded.model.high_halves()
    assert high.step_bytes < 0.7 * loaded.model.step_bytes and torch.equal(loaded.model(tokens), before)
    assert 0 < (high(tokens) - before).norm() < 0.4 * before.norm()


def test_a_token_reads_the_experts_that_it_is_sent_to(made):
    loaded = made("mixtral", num_local_experts=8)
    linears = loaded.model.linears().items()
    experts = sum(linear.weight.nbytes for name, linear in linears if ".experts." in name)
    assert loaded.model.step_bytes < loaded.model.weight_bytes - 0.7 * experts


def test_experts_that_are_quantized_in_two_ways_go_operation_by_operation(tmp_path):
    folder = tiny_model(tmp_path / "m", "mixtral")
    (tmp_path / "mixed.yaml").write_text(MIXED)
    loaded = load(str(quantize(str(folder), str(tmp_path / "mixed.yaml"), tmp_path / "out").out))
    assert "quantized alike, unlike those of layer 0" in loaded.fallback_reason
    assert torch.isfinite(loaded.model(ids(2, 9))).all()
