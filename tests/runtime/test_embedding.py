"""Models whose embedding is quantized, with a head of their own or as the head too: as one program, operation
by operation and in float32."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.plugins.manager import registry
from quantkit.quantization.run import quantize
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model

INT8 = "method: rtn, spec: {bits: 8, granularity: {strategy: channel}}"
WAYS = {"int8": INT8,
        "int4": "method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}",
        "int3-asym": "method: rtn, spec: {bits: 3, symmetric: false, "
                     "granularity: {strategy: group, size: 64}}",
        "nf4": "method: nf4, spec: {kind: nf, bits: 4, granularity: {strategy: block, size: 64}, "
               "scale_dtype: float32}",
        "fp8": "method: rtn, spec: {kind: fp, bits: 8, granularity: {strategy: channel}}"}
RECIPE = """
rules:
  - {{match: 're:model\\.embed_tokens|lm_head', {outside}}}
  - {{match: "*.o_proj"}}
  - {{match: "*", method: rtn, spec: {{bits: 8, granularity: {{strategy: group, size: 32}}}}}}
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """``make(way, family, **config)`` → a checkpoint, and the same in plain float32."""
    done = {}

    def call(way, family="llama", **config):
        key = (way, family, *config.items())
        if key not in done:
            folder = tmp_path_factory.mktemp("embedding")
            source = tiny_model(folder / "model", family, **config)
            (folder / "recipe.yaml").write_text(RECIPE.format(outside=WAYS[way]))
            out = quantize(str(source), str(folder / "recipe.yaml"), folder / "out").out
            done[key] = out, twin(source, out, folder / "twin")
        return done[key]

    return call


def twin(source, out, folder):
    """A plain model of what the checkpoint's weights mean, by their formats' ``dequantize`` alone."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = {name: value.float() for name, value in load_file(source / "model.safetensors").items()}
    with Checkpoint.open(out) as checkpoint:
        for row in checkpoint.layers:
            if (packed := checkpoint.quantized(row.name)) is not None:
                weights[f"{row.name}.weight"] = registry("formats").get(row.format).dequantize(packed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ids(*shape, seed=0):
    return torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("way", WAYS)
def test_it_computes_what_its_weights_mean(make, way, tied):
    out, plain = make(way, tie_word_embeddings=tied)
    expected = load(str(plain)).model(ids(2, 12))
    exact = load(str(out), dtype="float32")
    assert "is multiplied by reference" in exact.fallback_reason
    torch.testing.assert_close(exact.model(ids(2, 12)), expected, rtol=1e-4, atol=1e-4)
    fused = load(str(out))
    assert fused.fallback_reason is None
    for found in (fused.model(ids(2, 12)), fused.model._model(ids(2, 12)).float()):
        assert (found - expected).norm() <= 0.03 * expected.norm()


def test_a_tied_matrix_is_in_memory_and_in_the_file_once(make):
    out, _ = make("int8")
    stored = load_file(out / "model.safetensors")
    names = {name for name in stored if name.startswith(("model.embed", "lm_head"))}
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    assert names == {f"model.embed_tokens.{suffix}" for suffix in suffixes}
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    fused = load(str(out)).model
    assert fused._model.embedding is fused._model.head.weight
    held = sum(one.weight.nbytes for one in fused.linears().values())
    assert fused.step_bytes == held + fused._model.head.weight.nbytes
    slow = load(str(out), dtype="float32").model
    assert slow.embedding is slow.head.weight


def test_an_embedding_beside_a_head_is_packed_too(make):
    out, _ = make("int4", tie_word_embeddings=False)
    fused = load(str(out)).model
    table = fused._model.embedding
    assert table.name == "cpu-int4" and table is not fused._model.head.weight
    assert table.nbytes < 300 * 64 * 0.7 * 1.1  # 4 bits and scales; padded to 320 rows


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("way", ["int8", "int4", "nf4"])
def test_prefill_chunks_and_decoding_give_the_same_bits(make, way, tied):
    model = load(str(make(way, tie_word_embeddings=tied)[0])).model
    tokens = ids(1, 40)
    whole = model(tokens)

    def cut(*sizes):
        cache = KVCache(model.config, parse_kv("none"), model.dtype)
        sequence, found = cache.add(), []
        for part in tokens.split(sizes, dim=1):
            found.append(model(part, None, Batch(cache, [sequence], "prefill")))
        return torch.cat(found, dim=1)

    for sizes in ((17, 23), (1, 38, 1), (1,) * 40):
        assert torch.equal(cut(*sizes), whole)


def test_a_kv_policy_that_goes_operation_by_operation(make):
    loaded = load(str(make("int4")[0]))
    prompt, long = [ids(1, 24)[0].tolist()], Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    kept = generate(loaded, prompt, long, kv=parse_kv("snapkv(64)"))[0].token_ids
    assert kept == generate(loaded, prompt, long)[0].token_ids


@pytest.mark.parametrize("token", [300, -1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_unknown_token_is_refused(make, token, dtype):
    model = load(str(make("int8")[0]), dtype=dtype).model
    with pytest.raises(IndexError):
        model(torch.tensor([[5, token]]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"])
def test_families_that_do_something_else_with_it(make, family, tied):
    """Gemma scales embeddings and caps logits, Phi-3 fuses projections."""
    out, plain = make("int8", family, tie_word_embeddings=tied)
    expected = load(str(plain)).model(ids(2, 9))
    exact = load(str(out), dtype="float32").model(ids(2, 9))
    torch.testing.assert_close(exact, expected, rtol=1e-3, atol=1e-3)
    loaded = load(str(out))
    found = loaded.model(ids(2, 9)).float()
    assert (found - expected).norm() <= 0.05 * expected.norm()
    assert len(generate(loaded, [[5, 6, 7]], Sampling(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_what_is_said_of_it(make):
    out, _ = make("int8")
    loaded = load(str(out))
    with Checkpoint.open(out) as checkpoint:
        rows = {row.name: row for row in checkpoint.layers}
        assert next(iter(rows)) == "model.embed_tokens" and "lm_head" not in rows
        inside = [row for name, row in rows.items() if name != "model.embed_tokens"]
        weights = sum(row.shape[0] * row.shape[1] for row in inside)
        assert loaded.bits_per_weight == pytest.approx(8 * sum(row.bytes for row in inside) / weights)
    assert loaded.weight_bytes == pytest.approx(loaded.file_bytes, rel=0.1)
    assert "int8 channel sym" in loaded.label
