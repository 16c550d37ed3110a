"""Decoded pages: attention reads the same numbers as through a kernel, however pages are kept and moved."""

from __future__ import annotations

import pytest
import torch

from quantkit.evaluation.quality.feed import force, prefill
from quantkit.kv import store as store_module
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.decoded import DecodedPages
from quantkit.kv.spec import parse_kv
from quantkit.kv.store import PageStore
from quantkit.runtime.cpu import model as cpu_model
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.memory import kv as footprint_module
from quantkit.runtime.sampler import Sampling
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
        cache.decoded = DecodedPages(cache.layers, cache.move_counter, loaded.config.head_dim,
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
        store = layer.store
        for row in rows:
            state = cache.sequence(row).layers[index]
            pages = torch.tensor([page for head in state.pages for page in head], dtype=torch.int64)
            # of the last page some slots may not be written yet
            last = [] if cache.has_residual else [page for head in state.pages for page in head[-1:]]
            for side in "kv":
                kept, codes = store.decoded(side)[pages], store.decode_pages(side, pages)
                whole = torch.tensor([int(page) not in last for page in pages])
                assert torch.equal(kept[whole], codes[whole])
                checked += int(whole.sum())
    assert checked


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["int8", "fp8", "int4", "int3", "int2", "int8/int4", "window(64)+int8",
                                "window(256)+int4", "snapkv(0.5)+int8", "snapkv(0.9)+int4", "h2o(0.5)+int8"])
def test_the_bits_are_those_of_the_kernel(loaded, ids, kv, monkeypatch):
    expected, _ = run(loaded, ids, cache_of(loaded, kv))
    monkeypatch.setattr(cpu_model, "has_kernels", lambda cache: False)
    cache = cache_of(loaded, kv)
    actual, row = run(loaded, ids, cache)
    assert torch.equal(actual, expected)
    assert sum(layer.store.has_decoded_pages for layer in cache.layers) == len(cache.layers)
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
    limit = layers * int(some.layers[0].store.decoded_bytes * 1.5)
    cache = cache_of(loaded, kv, limit)
    actual, _ = run(loaded, ids, cache)
    assert torch.equal(actual, expected)
    assert sum(layer.store.has_decoded_pages for layer in cache.layers) == layers
    assert cache.decoded.shared_bytes > 0


def test_memory_is_counted_and_what_is_claimed_a_token_is_codes(loaded, ids, without_kernels):
    cache = cache_of(loaded, "int8")
    run(loaded, ids, cache)
    layers, dim = len(cache.layers), loaded.config.head_dim
    assert cache.bytes_per_token == layers * 2 * (dim + 2)  # of one head: codes and a scale, keys and values
    pages = sum(layer.store.pages.total for layer in cache.layers)
    assert cache.allocated_bytes == pages * 64 * 2 * (dim + 2 + 4 * dim)
    bounded = cache_of(loaded, "int8", 0)
    run(loaded, ids, bounded)
    assert bounded.allocated_bytes == pages * 64 * 2 * (dim + 2) + pages // layers * 64 * 2 * 4 * dim


def test_a_fixed_memory_is_not_exceeded(loaded, ids, monkeypatch):
    """Decoded pages get what the pages of codes leave, in a cache whose codec has no kernel."""
    monkeypatch.setattr(cpu_model, "has_kernels", lambda cache: False)
    for module in (footprint_module, store_module):
        monkeypatch.setattr(module, "is_ours", lambda codec: False)
    for size in (130_000, 300_000, 2_000_000):
        engine = Engine(loaded, kv=parse_kv("int8"), max_batch=2, context=256, memory=size)
        engine.submit(ids[:100], Sampling(max_tokens=100, ignore_eos=True))
        while engine.step():
            assert engine.cache.allocated_bytes <= size


def test_free_pages_are_not_decoded(loaded, without_kernels, monkeypatch):
    cache = cache_of(loaded, "int8")
    for layer in cache.layers:
        layer.store.pages.preallocate(1000)
    decoded = []
    decode = PageStore.decode_pages
    monkeypatch.setattr(PageStore, "decode_pages", lambda self, side, table: (
        decoded.append(table.numel()), decode(self, side, table))[1])
    row = cache.add(TOKENS)
    prefill(loaded, cache, row, list(range(4, 40)))
    assert sum(decoded) <= 2 * 2 * len(cache.layers)


def test_another_thread_may_ask_while_parts_come_and_go(loaded, ids, without_kernels):
    """Whoever iterates over a pool's parts keeps the mapping that it began with."""
    cache = cache_of(loaded, "int8")
    run(loaded, ids, cache)
    pool = cache.layers[0].store.pages
    names = iter(pool.parts.items())
    next(names)
    pool.forget_derived()
    assert len(list(names)) == len(pool.parts) + 1
    names = iter(pool.parts.items())
    cache.layers[0].store.keep_decoded()
    assert len(list(names)) == len(pool.parts) - 2


def test_two_caches_take_turns_in_one_model(loaded, ids, without_kernels):
    expected = [run(loaded, ids, cache_of(loaded, kv))[0] for kv in ("int8", "fp8")]
    caches = [cache_of(loaded, "int8"), cache_of(loaded, "fp8", 0)]
    rows = [cache.add(TOKENS) for cache in caches]
    steps = [[prefill(loaded, cache, row, ids[:PROMPT]).reshape(1, -1).clone()]
             for cache, row in zip(caches, rows)]
    for at in range(PROMPT, TOKENS):
        for cache, row, logits in zip(caches, rows, steps):
            logits.append(force(loaded, cache, row, ids[at:at + 1], at - PROMPT))
    for logits, whole in zip(steps, expected):
        assert torch.equal(torch.cat(logits), whole)


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("limit", [None, 0, 60_000])
def test_company_changes_no_bit(loaded, ids, kv, limit, without_kernels):
    """Nor where company pushes layers over the limit in the middle of a text."""
    def logits(rows):
        cache = cache_of(loaded, kv, limit)
        numbers = [cache.add(TOKENS) for _ in rows]
        for number, shift in zip(numbers, rows):
            prefill(loaded, cache, number, ids[shift:shift + 100])
        steps = []
        for token in ids[:80]:
            batch = Batch(cache, numbers, "decode")
            steps.append(loaded.model(torch.tensor([[token]] * len(rows)), cache=batch)[0, -1].clone())
        return torch.stack(steps)

    assert torch.equal(logits([0]), logits([0, 7, 30]))
