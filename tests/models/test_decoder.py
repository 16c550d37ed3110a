"""A model agrees with itself: alone or in a batch, at once or in pieces, whole or layer by layer."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.models.decoder import DecoderLayer
from quantkit.models.linear import Weights
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_weights

CASES = [("llama", {}), ("mistral", {"sliding_window": 5}), ("qwen2", {"tie_word_embeddings": False}),
         ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
         ("phi3", {"partial_rotary_factor": 0.5}), ("mixtral", {}), ("qwen3_moe", {"mlp_only_layers": [1]}),
         ("gemma2", {"sliding_window": 5}), ("gemma3_text", {"sliding_window": 4, "head_dim": 32})]


def tokens(batch, length, seed=0):
    return torch.randint(0, 300, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, bound=2e-5):
    assert torch.isfinite(a).all()
    assert (a - b).abs().max().item() <= bound


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "keys"), CASES)
@pytest.mark.parametrize("sizes", [[12, 1, 1, 1, 1], [5, 7, 1, 3], [1] * 16])
def test_pieces_equal_the_whole(make_config, make_model, family, keys, sizes, fed):
    model, ids = make_model(make_config(family, **keys)), tokens(2, 16)
    cached = fed(model, 2)
    got, start = [], 0
    for size in sizes:
        got.append(cached(ids[:, start:start + size]))
        start += size
    close(torch.cat(got, 1), model(ids))


@pytest.mark.parametrize(("family", "keys"), CASES)
def test_ragged_batches_equal_single_runs(make_config, make_model, family, keys, fed):
    model, lengths = make_model(make_config(family, **keys)), [9, 3, 1, 12]
    ids, more = tokens(4, 12), tokens(4, 5, seed=1)
    positions = torch.arange(12).expand(4, 12).clone()
    for row, length in enumerate(lengths):
        positions[row, length:] = -1
    cached = fed(model, 4)
    first = cached(ids, positions, last=torch.tensor(lengths) - 1)
    assert first.shape == (4, 300)
    steps = [first] + [cached(more[:, t:t + 1])[:, 0] for t in range(5)]
    for row, length in enumerate(lengths):
        alone = model(torch.cat((ids[row:row + 1, :length], more[row:row + 1]), 1))[0, length - 1:]
        close(torch.stack([s[row] for s in steps]), alone)


def test_ragged_chunks_after_a_ragged_prefill(make_config, make_model, fed):
    model, ids = make_model(make_config("llama")), tokens(2, 11)
    cached = fed(model, 2)
    fed, out = [0, 0], [[], []]
    for counts in ([4, 2], [0, 5], [5, 4], [2, 0]):
        width = max(counts)
        positions, chunk = torch.full((2, width), -1), torch.zeros(2, width, dtype=torch.int64)
        for row, count in enumerate(counts):
            positions[row, :count] = torch.arange(fed[row], fed[row] + count)
            chunk[row, :count] = ids[row, fed[row]:fed[row] + count]
        logits = cached(chunk, positions)
        for row, count in enumerate(counts):
            out[row].append(logits[row, :count])
            fed[row] += count
    assert [cached.cache.seen(row) for row in cached.rows] == [11, 11]
    close(torch.stack([torch.cat(o) for o in out]), model(ids))


def test_layer_by_layer_equals_the_model(make_config, make_model):
    config = make_config("qwen2")
    model, weights, ids = make_model(config), tiny_weights(config), tokens(1, 7)
    source = Weights(weights.__getitem__, weights.__contains__, torch.float32)
    x, positions = model.embed(ids), torch.arange(7)[None]
    for i in range(2):
        x = DecoderLayer(model.config, i, source)(x, positions, None)
    assert torch.equal(model.logits(x), model(ids))


def test_bfloat16_stays_near_float32(make_config, make_model):
    config = make_config("llama")
    weights = {n: t.bfloat16().float() for n, t in tiny_weights(config).items()}
    ids = tokens(2, 20)
    exact, half = make_model(config, weights), make_model(config, weights, torch.bfloat16)
    logits = half(ids)
    assert logits.dtype == torch.bfloat16
    assert ((logits.float() - exact(ids)).norm() / exact(ids).norm()).item() < 0.02


def test_calibration_hooks_see_every_input(make_config, make_model):
    model, seen = make_model(make_config("llama")), {}
    for name, one in model.layers[0].linears().items():
        one.observer = lambda x, name=name: seen.setdefault(name.rsplit(".", 1)[-1], x)
    model(tokens(2, 5))
    assert seen["q_proj"] is seen["k_proj"] and seen["gate_proj"] is seen["up_proj"]
    assert seen["down_proj"].shape == (2, 5, 128)


def test_a_tensor_of_the_wrong_shape_is_named(make_config, make_model):
    config = make_config("llama")
    weights = tiny_weights(config)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
    with pytest.raises(SourceError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \[3, 4\]"):
        make_model(config, weights)
    weights = tiny_weights(config) | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(SourceError, match=r"model\.norm"):
        make_model(config, weights)


def test_positions_follow_what_a_cache_holds(make_config, make_model, fed):
    model = make_model(make_config("llama"))
    ids, cached = tokens(2, 9), fed(model, 2)
    parts = [model(ids[:, at:at + 3], cache=Batch(cached.cache, cached.rows)) for at in (0, 3, 6)]
    close(torch.cat(parts, 1), model(ids))
    with pytest.raises(ValueError, match="1 rows for 2 sequences"):
        model(ids[:1], cache=Batch(cached.cache, cached.rows))
