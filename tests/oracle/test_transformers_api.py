"""transformers' models with our KV cache and our weights, beside our engine."""

from __future__ import annotations

import importlib

import pytest
import torch

import quantkit
from quantkit.kv.batch import Batch
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model

AutoModelForCausalLM = pytest.importorskip("transformers", reason="needs the extra transformers"
                                           ).AutoModelForCausalLM
api = importlib.import_module("quantkit.api.transformers")
Cache, QuantizedLinear, quantize_linears = api.Cache, api.QuantizedLinear, api.quantize_linears
pytestmark = pytest.mark.oracle
LONG = 300
"""Tokens of a prompt: some pages, and more than a window."""


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3_text", "gpt_oss", "gemma2", "mistral"])
def folder(request, tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("transformers") / "tiny", request.param, dtype="float32",
                          hidden_size=128, head_dim=32, intermediate_size=256,
                          max_position_embeddings=2048))


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def prompt(length: int = LONG, rows: int = 1) -> torch.Tensor:
    return torch.randint(5, 250, (rows, length), generator=torch.Generator().manual_seed(3))


def answer(model, ids: torch.Tensor, **options) -> list[list[int]]:
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24,
                             eos_token_id=-1, **options)
    return out[:, ids.shape[1]:].tolist()


def ours(folder: str, ids: torch.Tensor, kv: str) -> list[list[int]]:
    model = quantkit.load(folder, kv=kv, dtype="float32", device="cpu", progress=False)
    return [model.generate(row, max_tokens=24, ignore_eos=True).token_ids for row in ids.tolist()]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kv", ["none", "window(64, sinks=4)", "snapkv(0.5)", "pyramidkv(0.5)", "h2o(0.5)"])
def test_tokens_are_those_of_our_engine(folder, theirs, kv):
    ids = prompt()
    cache = Cache(theirs, kv)
    assert answer(theirs, ids, past_key_values=cache) == ours(folder, ids, kv)
    assert cache.get_seq_length() == LONG + 23


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kv", ["int8", "int4", "fp8", "window(64, sinks=4)+int8", "snapkv(0.5)+int4"])
def test_codes_are_those_of_our_cache(folder, theirs, kv):
    """Codes of nearly equal numbers may differ by one: logits are close, and tokens mostly the same."""
    ids = prompt(130)
    model = quantkit.load(folder, kv=kv, dtype="float32", device="cpu", progress=False)
    (tokens,) = answer(theirs, ids, past_key_values=Cache(theirs, kv))
    same = model.generate(ids[0].tolist(), max_tokens=24, ignore_eos=True).token_ids
    assert tokens[:4] == same[:4]


@pytest.mark.sampled(2)
def test_without_a_cache_of_ours_nothing_changes(folder, theirs):
    ids = prompt(40)
    own = theirs.config._attn_implementation
    answer(theirs, ids, past_key_values=Cache(theirs, "none"))
    assert theirs.config._attn_implementation == own
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    assert answer(theirs, ids) == answer(plain, ids)
    with torch.no_grad():
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :5] = 0
        assert torch.equal(theirs(prompt(12, 2), attention_mask=mask).logits,
                           plain(prompt(12, 2), attention_mask=mask).logits)


@pytest.mark.sampled(3)
def test_rows_of_a_batch_and_a_text_that_goes_on(folder, theirs):
    ids = prompt(70, 3)
    cache = Cache(theirs, "none")
    assert answer(theirs, ids, past_key_values=cache) == ours(folder, ids, "none")
    cache.reset()
    assert cache.get_seq_length() == 0 == cache.nbytes
    (first,) = answer(theirs, ids[:1], past_key_values=cache)
    more = torch.cat([ids[:1], torch.tensor([first]), prompt(30)], 1)
    assert answer(theirs, more, past_key_values=cache) == ours(folder, more, "none")


@pytest.mark.sampled(3)
def test_bytes_are_given_back(theirs):
    ids, sizes = prompt(1200), {}
    for kv in ("none", "int4", "snapkv(0.25)", "snapkv(0.25)+int4"):
        cache = Cache(theirs, kv)
        answer(theirs, ids, past_key_values=cache)
        sizes[kv] = cache.nbytes
    assert sizes["snapkv(0.25)"] < 0.5 * sizes["none"] and sizes["int4"] < 0.4 * sizes["none"]
    assert sizes["snapkv(0.25)+int4"] < min(sizes["int4"], sizes["snapkv(0.25)"])


@pytest.mark.parametrize(("kv", "words"), [("kvzip(0.5)", "reads a prompt twice"), ("int9", "int9")])
def test_settings_that_cannot_be(theirs, kv, words):
    with pytest.raises(UsageError, match=words):
        Cache(theirs, kv)


@pytest.mark.sampled(3)
def test_what_cannot_be_is_refused(theirs):
    ids = prompt(20, 2)
    padded = torch.ones_like(ids)
    padded[0, :6] = 0
    cache = Cache(theirs, "int8")
    with pytest.raises(QuantkitError, match="padded batch"):
        theirs.generate(ids, attention_mask=padded, past_key_values=cache, max_new_tokens=2)
    with torch.no_grad(), pytest.raises(QuantkitError, match="a padded batch"):
        looks = torch.ones(1, 1, 20, 20, dtype=torch.bool)  # everybody sees everybody
        theirs(ids[:1], attention_mask=looks, past_key_values=Cache(theirs, "int8"))
    with pytest.raises(QuantkitError, match="beam search"):
        answer(theirs, ids, past_key_values=Cache(theirs, "int8"), num_beams=2)
    cache = Cache(theirs, "int8")
    answer(theirs, ids, past_key_values=cache)
    with pytest.raises(UsageError, match="holds 2 rows, and 1 come"):
        theirs(ids[:1], past_key_values=cache)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("recipe", ["int8", "int4-rtn", "nf4"])
def test_linears_are_those_of_a_checkpoint(folder, tmp_path, recipe):
    ids = prompt(24)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    rows = quantize_linears(model, recipe, progress=False)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == len(rows)
    made = quantkit.quantize(folder, recipe, tmp_path / "out", device="cpu", progress=False)
    expected = {row.name: row for row in made.layers
                if row.method and row.name != "model.embed_tokens" and "experts" not in row.name}
    assert {row.name: row.error for row in rows} == {name: row.error for name, row in expected.items()}
    for row in rows:
        module = model.get_submodule(row.name)
        x = torch.randn(5, module.in_features, generator=torch.Generator().manual_seed(1))
        assert torch.equal(module(x), QuantizedLinear(made.quantized(row.name), module.bias, torch.float32,
                                                      torch.device("cpu"))(x))
    assert torch.isfinite(model(ids).logits).all() and row.spec.label() in repr(model)
    with pytest.raises(QuantkitError, match="can't be moved"):
        model.to("meta")


def test_recipes_that_calibrate_are_refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    before = repr(model)
    with pytest.raises(UsageError, match="needs calibration"):
        quantize_linears(model, "int4", progress=False)
    with pytest.raises(UsageError, match="takes none"):
        quantize_linears(torch.nn.Sequential(torch.nn.Linear(8, 8)), "int4-rtn", progress=False)
    assert repr(model) == before


def test_nothing_is_trained_or_saved(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    quantize_linears(model, "int4-rtn", progress=False)
    assert not model(prompt(8)).logits.requires_grad
    with pytest.raises(QuantkitError, match="can't be saved"):
        model.save_pretrained(tmp_path / "saved")
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(QuantkitError, match="nothing can be trained"):
        model(prompt(8))


@pytest.mark.sampled(3)
def test_after_an_error_the_cache_begins_anew(theirs, monkeypatch):
    ids, cache = prompt(40), Cache(theirs, "none")
    right = answer(theirs, ids, past_key_values=Cache(theirs, "none"))
    attend, calls = Batch.attend, []

    def fails(self, *args):
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return attend(self, *args)

    monkeypatch.setattr(Batch, "attend", fails)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        theirs(ids, past_key_values=cache)
    monkeypatch.undo()
    with pytest.raises(QuantkitError, match="going on after an error"):
        answer(theirs, ids, past_key_values=cache)
    assert answer(theirs, ids, past_key_values=cache) == right
