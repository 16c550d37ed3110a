"""Decoded pages: attention reads the same numbers as through a kernel, however pages are kept and moved."""

from __future__ import annotations

import pytest
import torch

from quantkit.evaluate.feed import force, prefill
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.decoded import DecodedPages
from quantkit.kvspec import parse_kv
from quantkit.runtime.cpu import model as cpu_model
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.loader import load
from quantkit.testing import VOCAB, tiny_model

PROMPT, TOKENS = 150, 300


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoded") / "tiny"
    model = load(str(tiny_model(folder, num_attention_heads=2, num_key_value_heads=1)))
    if not isinstance(model.model, CpuModel):
        pytest.skip("this CPU has no kernels of ours")
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(4, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def without_kernels(monkeypatch):
    """Every codec is read as a plugin's would be."""
    monkeypatch.setattr(cpu_model, "has_kernels", lambda cache: False)


def cache_of(loaded, kv, limit=None):
    cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
    if limit is not None:
        cache.decoded = DecodedPages(cache.layers, cache.move_counter, cache.heads, loaded.config.head_dim,
                                     limit)
    return cache


def run(loaded, ids, cache):
    """Logits after the prompt and after each forced token."""
    row = cache.add(TOKENS)
    first = prefill(loaded, cache, row, ids[:PROMPT]).reshape(1, -1).clone()
    return torch.cat((first, force(loaded, cache, row, ids[PROMPT:]))), row


def check_pages(cache, rows):
    """What is kept decoded is what the codes decode to, in every page that belongs to a sequence."""
    checked = 0
    for index, layer in enumerate(cache.layers):
        coded = layer.store.coded
        for row in rows:
            state = cache.sequence(row).layers[index]
            pages = torch.tensor([page for head in state.pages for page in head], dtype=torch.int64)
            # of the last page some slots may not be written yet
            last = [] if cache.has_residual else [page for head in state.pages for page in head[-1:]]
            for side in "kv":
                kept, codes = coded.decoded(side)[pages], coded.decode(side, pages)
                whole = torch.tensor([int(page) not in last for page in pages])
                assert torch.equal(kept[whole], codes[whole])
                checked += int(whole.sum())
    assert checked


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4", "int3", "int2", "int8/int4", "window(64)+int8",
                                "window(256)+int4", "snapkv(0.5)+int8", "snapkv(0.9)+int4", "h2o(0.5)+int8"])
def test_the_bits_are_those_of_the_kernel(loaded, ids, kv, monkeypatch):
    expected, _ = run(loaded, ids, cache_of(loaded, kv))
    monkeypatch.setattr(cpu_model, "has_kernels", lambda cache: False)
    cache = cache_of(loaded, kv)
    actual, row = run(loaded, ids, cache)
    assert torch.equal(actual, expected)
    assert cache.decoded.kept_layers == len(cache.layers)
    check_pages(cache, [row])


def test_rotated_vectors(loaded, ids, monkeypatch):
    """Kernels sum in another order than torch there; the result is as close as that."""
    expected, _ = run(loaded, ids, cache_of(loaded, "rotation"))
    monkeypatch.setattr(cpu_model, "has_kernels", lambda cache: False)
    actual, _ = run(loaded, ids, cache_of(loaded, "rotation"))
    assert not torch.equal(actual, torch.zeros_like(actual))
    assert float((actual - expected).abs().mean()) < 0.02 * float(expected.abs().mean())


@pytest.mark.parametrize("kv", ["int8", "int4", "window(256)+int4", "snapkv(0.5)+int8"])
@pytest.mark.parametrize("layers", [0, 1])
def test_layers_beyond_the_limit_give_the_same_bits(loaded, ids, kv, layers, without_kernels):
    expected, _ = run(loaded, ids, cache_of(loaded, kv))
    some = cache_of(loaded, kv)
    run(loaded, ids, some)
    limit = layers * int(some.layers[0].store.coded.decoded_bytes * 1.5)
    cache = cache_of(loaded, kv, limit)
    actual, _ = run(loaded, ids, cache)
    assert torch.equal(actual, expected)
    assert cache.decoded.kept_layers == layers and cache.decoded.shared_bytes > 0


def test_memory_is_counted_and_what_is_claimed_a_token_is_codes(loaded, ids, without_kernels):
    plain, cache = cache_of(loaded, "int8"), cache_of(loaded, "int8")
    run(loaded, ids, cache)
    floats = sum(layer.store.coded.decoded_bytes for layer in cache.layers)
    assert cache.bytes_per_token == plain.bytes_per_token
    assert cache.allocated_bytes == floats + sum(
        pool.page_bytes * pool.total for layer in cache.layers for pool in layer.store.all)
    assert floats <= sum(layer.store.coded.decoded_bytes for layer in cache.layers)


def test_forks_and_freed_pages(loaded, ids, without_kernels):
    cache = cache_of(loaded, "int8")
    _, row = run(loaded, ids, cache)
    forks = [cache.fork(row, shared=shared) for shared in (True, False)]
    for step, token in enumerate(ids[:70]):
        batch = Batch(cache, [row, *forks], "decode")
        loaded.model(torch.tensor([[token], [token], [ids[-step]]]), cache=batch)
    check_pages(cache, [row, *forks])
    cache.free([row])  # a quarter is free: the others' pages move
    check_pages(cache, forks)
    logits = loaded.model(torch.tensor([[5]]), cache=Batch(cache, [forks[0]], "decode"))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_company_changes_no_bit(loaded, ids, kv, without_kernels):
    def logits(rows):
        cache = cache_of(loaded, kv)
        numbers = [cache.add(TOKENS) for _ in rows]
        for number, shift in zip(numbers, rows):
            prefill(loaded, cache, number, ids[shift:shift + 100])
        steps = []
        for token in ids[:80]:
            batch = Batch(cache, numbers, "decode")
            steps.append(loaded.model(torch.tensor([[token]] * len(rows)), cache=batch)[0, -1].clone())
        return torch.stack(steps)

    assert torch.equal(logits([0]), logits([0, 7, 30]))
