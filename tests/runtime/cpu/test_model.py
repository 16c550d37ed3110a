"""A model as one program: the same calls at every shape, and nothing that isn't its own."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.policies.window import SPLIT as WINDOW_SPLIT
from quantkit.kv.spec import parse_kv
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.ops.stored_weight import PlainWeight
from quantkit.quantization.run import quantize
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model
from quantkit_kernels.cpu.attention import SPLIT


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A tiny model in bfloat16."""
    return load(str(tiny_model(tmp_path_factory.mktemp("fused") / "tiny"))).model


@pytest.fixture(scope="module")
def plain(fused):
    """The same, operation by operation."""
    assert isinstance(fused, CpuModel) and isinstance(fused._model, CausalLM)
    return fused._model


def ids(*shape, seed=0):
    return torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1), (3, 7), (600, 1), (2, 600)])
def test_every_shape_that_the_model_takes(fused, plain, shape):
    found = fused(ids(*shape))
    assert found.shape == (*shape, 300) and fused.hidden(ids(*shape)).shape == (*shape, 64)
    if found.numel():
        expected = plain(ids(*shape)).float()
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_what_inference_mode_left_is_used_outside_of_it_too(fused):
    model = CpuModel(fused._model)
    with torch.inference_mode():
        logits, hidden = model(ids(1, 5)), model.hidden(ids(1, 5))
    assert torch.equal(model.logits(model.hidden(ids(1, 5))), logits)
    assert torch.equal(model.logits(hidden.clone()), logits)


def test_threads_take_turns(fused):
    """Engines over one model may have a lock each."""
    texts = [ids(2, 30 + 5 * seed, seed=seed) for seed in range(4)]
    alone = [fused(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            for expected, got in zip(alone, threads.map(fused, texts), strict=True):
                assert torch.equal(got, expected)


def test_the_last_positions_alone(fused):
    every = fused(ids(3, 6))
    assert torch.equal(fused(ids(3, 6), last=torch.tensor([-1, 0, 3])), every[[0, 1, 2], [5, 0, 3]])
    positions = torch.tensor([[0, 1, -1], [0, 1, 2]])
    with pytest.raises(ValueError, match="last is 2 in a row of 2 tokens"):
        fused(ids(2, 3), positions, last=torch.tensor([2, 2]))


@pytest.mark.parametrize("token", [300, 10**12, -1, -10**12])
def test_an_unknown_token_is_refused(fused, token):
    with pytest.raises(IndexError, match="token id"):
        fused(torch.tensor([[5, token]]))


@pytest.mark.parametrize("recipe", ["int8", "int4", "nf4", "w8a8", "fp8"])
def test_a_broken_weight_shows(tmp_path, recipe):
    """Rounding to integers must not make numbers of what is none."""
    source = tiny_model(tmp_path / "tiny")
    model = load(str(source)).model
    quantize(str(source), recipe, tmp_path / recipe, calibration=None)
    model = load(str(tmp_path / recipe)).model
    assert torch.isfinite(model(ids(1, 4))).all()
    norm = model._model.layers[0].before_mlp
    norm.weight = torch.cat((norm.weight[:3], torch.tensor([float("nan")]), norm.weight[4:]))
    again = CpuModel(model._model)
    assert not torch.isfinite(again(ids(1, 4))).any()


def test_what_one_request_broke_does_not_reach_the_next(tmp_path):
    """36 is no multiple of what is multiplied at once: rows have a padding that must stay 0."""
    model = load(str(tiny_model(tmp_path / "odd", hidden_size=36, head_dim=32, num_attention_heads=3,
                                num_key_value_heads=1, tie_word_embeddings=False))).model
    table = model._model.embedding.tensor.clone()  # the file's own can't be written to
    model._model.embedding = PlainWeight(table)
    clean = model(ids(1, 3))
    kept = table[7].clone()
    table[7] = float("inf")
    assert not torch.isfinite(model(torch.tensor([[7, 7, 7]]))).all()
    table[7] = kept
    assert torch.equal(model(ids(1, 3)), clean)


def test_a_cache_is_gone_when_nobody_wants_it(fused):
    cache = KVCache(fused.config, parse_kv("int8"), fused.dtype)
    fused(ids(1, 5), cache=Batch(cache, [cache.add()]))
    pages = [weakref.ref(part) for pages in cache.pools for part in pages.parts.values()]
    del cache
    assert not any(one() is not None for one in pages)


def test_steps_of_both_kinds_take_turns(fused, plain):
    """Operation by operation after the program, and back: both know where the pages end."""
    cache = KVCache(fused.config, parse_kv("none"), fused.dtype)
    row, tokens, found = cache.add(), ids(1, 200), []
    for start, stop in ((0, 10), (10, 40), (40, 63), (63, 64), (64, 65), (65, 127), (127, 130), (130, 200)):
        model = plain if len(found) % 2 else fused
        found.append(model(tokens[:, start:stop], cache=Batch(cache, [row])).float())
    expected = fused(tokens)
    assert (torch.cat(found, 1) - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("kv", ["none", "int8(residual_length=64)"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_pages_of_another_type_are_read_as_what_they_are(fused, dtype, kv):
    found = []
    for kind in (torch.bfloat16, dtype):
        cache = KVCache(fused.config, parse_kv(kv), kind)
        batch = Batch(cache, [cache.add()])
        assert fused.reason_against(batch.cache) is None
        found.append(fused(ids(1, 90), cache=batch))
    assert (found[1] - found[0]).norm() <= 0.02 * found[0].norm()
    cache = KVCache(fused.config, parse_kv("none"), torch.float64)
    assert "not float64" in fused.reason_against(cache)


@pytest.mark.parametrize("kv", ["none", "int8", "int4", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "error"), [("float16", 0.004), ("float32", 1e-4)])
def test_models_of_other_dtypes_are_programs_too(tmp_path, dtype, error, tied, kv):
    """And compute what torch does, in that dtype."""
    loaded = load(str(tiny_model(tmp_path / "m", "gemma3_text", head_dim=32, query_pre_attn_scalar=32,
                                 tie_word_embeddings=tied)), dtype=dtype)
    assert isinstance(loaded.model, CpuModel) and loaded.model.dtype == getattr(torch, dtype)
    plain = CausalLM(loaded.config, Weights(*tensors(tmp_path / "m"), torch.float32))
    expected = plain(ids(2, 80))
    assert (loaded.model(ids(2, 80)) - expected).norm() <= error * expected.norm()
    cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
    rows = [cache.add(), cache.add()]
    pieces = ids(2, 80).split([40, 1, 39], 1)
    found = torch.cat([loaded.model(some, cache=Batch(cache, rows)) for some in pieces], 1)
    assert (found - expected).norm() <= (0.1 if kv == "int4" else 0.02) * expected.norm()


def tensors(folder):
    """A plain model's, by name, and whether they are there."""
    held = load_file(folder / "model.safetensors")
    return held.__getitem__, held.__contains__


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", [None, "int8", "int4-rtn", "nf4"])
@pytest.mark.parametrize(("family", "keys"), [
    ("phi3", {"sliding_window": 40}),
    ("gemma3_text", {"sliding_window": 40, "final_logit_softcapping": 20.0}),
    ("gemma2", {"attn_logit_softcapping": None, "tie_word_embeddings": False})])
def test_families_that_differ_from_llama(tmp_path, family, keys, recipe):
    folder = tiny_model(tmp_path / "model", family, **keys)
    if recipe is not None:
        folder = quantize(str(folder), recipe, tmp_path / "out").out
    loaded = load(str(folder))
    assert isinstance(loaded.model, CpuModel) and loaded.fallback_reason is None
    tokens = ids(3, 70)
    expected, found = loaded.model._model(tokens).float(), loaded.model(tokens)
    assert (found - expected).norm() <= 0.03 * expected.norm()
    cache = KVCache(loaded.config, parse_kv("int8"), loaded.dtype)
    rows = [cache.add() for _ in range(3)]
    pieces = [loaded.model(some, cache=Batch(cache, rows)) for some in tokens.split([33, 1, 1, 35], 1)]
    own = KVCache(loaded.config, parse_kv("int8"), loaded.dtype)
    alone = loaded.model(tokens[1:2], cache=Batch(own, [own.add()]))
    assert torch.equal(torch.cat(pieces, 1)[1], alone[0])


@pytest.mark.parametrize(("family", "keys", "reason"), [
    ("gemma2", {}, "capped scores"), ("gemma3_text", {"query_pre_attn_scalar": 20}, "scaled scores"),
    ("phi3", {"partial_rotary_factor": 0.5}, "a rotation of parts of a head"),
    ("phi3", {"intermediate_size": 96}, "fused MLPs whose size 64 divides, not 96"),
    ("phi3", {"original_max_position_embeddings": 64, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}, "the sequence's length")])
def test_what_has_no_kernel_says_so_and_runs(tmp_path, family, keys, reason):
    loaded = load(str(tiny_model(tmp_path / "model", family, **keys)))
    assert isinstance(loaded.model, CausalLM) and reason in loaded.fallback_reason
    assert torch.isfinite(loaded.model(ids(2, 30))).all()


@pytest.mark.parametrize("kv", ["snapkv(20, window=4)", "snapkv(20, window=4)+int4",
                                "snapkv(20, window=4)+int8(residual_length=64)",
                                "snapkv(150, window=4)+int4(residual_length=0)"])
def test_what_was_kept_is_seen_through_a_models_own_window(tmp_path, kv):
    """Slots are no positions any more, also where no page of codes is left."""
    folder = tiny_model(tmp_path / "m", "mistral", sliding_window=40, head_dim=32, dtype="bfloat16")
    loaded = load(str(folder))
    ids = torch.randint(4, 300, (1, 801), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.inference_mode():
        for model in (loaded.model, loaded.model._model):
            cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
            number = cache.add()
            loaded.model(ids[:, :800], cache=Batch(cache, [number], "prefill_end"))
            step = Batch(cache, [number], "decode")
            found.append(model(ids[:, 800:], step.next_positions(), step).float())
    assert torch.isfinite(found[0]).all()
    assert (found[0] - found[1]).abs().mean() < 0.02 * found[1].abs().mean() + 0.02


@pytest.mark.sampled(8)
@pytest.mark.parametrize("codec", ["none", "int8", "int4", "rotation(3)"])
@pytest.mark.parametrize("policy", ["snapkv(0.4, window=30)", "pyramidkv(0.4, window=10)", "adakv(0.4)",
                                    "h2o(200, interval=20)", "tova(150, interval=9)", "expected(0.4)"])
def test_policies_keep_the_same_by_either_way(tmp_path, policy, codec):
    """Queries come from kernels, or from the model's own operations: what is kept is the same but for near
    ties, and the program reads what it left."""
    loaded = load(str(tiny_model(tmp_path / "m", head_dim=32)))
    assert isinstance(loaded.model, CpuModel)
    tokens, caches = ids(1, 700, seed=5), []
    with torch.inference_mode():
        for model in (loaded.model, loaded.model._model):
            cache = KVCache(loaded.config, parse_kv(f"{policy}+{codec}"), loaded.dtype)
            number = cache.add()
            for begin, end, phase in ((0, 560, "prefill"), (560, 600, "prefill_end"),
                                      *((i, i + 1, "decode") for i in range(600, 699))):
                batch = Batch(cache, [number], phase)
                assert model is not loaded.model or loaded.model.reason_against(cache) is None
                model(tokens[:, begin:end], batch.next_positions(end - begin), batch)
            caches.append((cache, number))
        (mine, number), (other, its) = caches
        held = [[sum(row) for row in cache.slots(row_)] for cache, row_ in caches]
        assert held[0] == held[1] and max(map(max, mine.slots(number))) < 690
        # near ties between heads may fall to either
        assert policy.startswith("adakv") or mine.slots(number) == other.slots(its)
        assert policy.startswith("adakv") or mine.used_bytes == other.used_bytes
        for layer in range(loaded.config.num_layers):
            for a, b in zip(mine.positions(number, layer).tolist(), other.positions(its, layer).tolist()):
                assert len({*a} & {*b}) > 0.85 * len({*a} | {*b}), (layer, "far more than near ties differ")
        ends = []
        for model in (loaded.model, loaded.model._model):  # over the same pages
            copy = mine.fork(number)
            batch = Batch(mine, [copy], "decode")
            ends.append(model(tokens[:, 699:], batch.next_positions(), batch).float())
        assert (ends[0] - ends[1]).norm() <= 0.03 * ends[1].norm()


@pytest.mark.parametrize("kv", ["none", "int8", "int4", "int4(residual_length=200)", "int4(sinks=128)",
                                "int8(residual_length=64, sinks=300)", "rotation(3, residual_length=0)"])
def test_when_a_window_of_the_models_own_is_given_back_changes_no_bit(tmp_path, kv):
    loaded = load(str(tiny_model(tmp_path / "model", "gemma3_text", sliding_window=40, head_dim=32,
                                 query_pre_attn_scalar=32)))
    tokens, found = ids(1, 1000), []
    for cuts in ([1000], [400, 1, 1, 98, 500], [33, 867, 100], [1] * 20 + [980]):
        cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
        row = cache.add()
        pieces = [loaded.model(some, cache=Batch(cache, [row])) for some in tokens.split(cuts, 1)]
        found.append(torch.cat(pieces, 1))
        assert max(cache.slots(row)[0]) <= 320 + 300 + 255 and cache.slots(row)[1] == (1000, 1000)
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_a_window_goes_by_what_attention_sums_up():
    assert WINDOW_SPLIT == SPLIT
