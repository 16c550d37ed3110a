"""What is predicted of a cache is what it holds after tokens have really been fed to a model."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from pydantic import Field

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.policies.snapkv import SnapKV
from quantkit.kv.reread import finish_prompt
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.kv.store import PageStore
from quantkit.models.architecture import parse_config
from quantkit.plugins.manager import registry
from quantkit.runtime.loader import load
from quantkit.runtime.memory import kv as footprint_module
from quantkit.runtime.memory.kv import footprint
from quantkit.testing import tiny_model

CHUNK = 128
SETTINGS = ("none", "int8", "fp8", "int4", "int3(residual_length=0, sinks=0)",
            "int2(residual_length=100, sinks=70)", "int8/int4", "rotation(2.5)", "int8(residual_length=64)",
            "window(100, sinks=4)", "window(70)+int4", "snapkv(50)+int8", "snapkv(0.5)",
            "snapkv(0.25, window=8)+int4", "tova(90, interval=8)", "tova(64)+rotation(3)",
            "pyramidkv(0.5, window=8)", "adakv(60)+int4", "h2o(0.3, interval=16)", "expected(80)+int8",
            "kvzip(0.5, chunk=100)", "kvzip(100)+int4", "snapkv(0.15MB, window=8)", "h2o(0.1MB)+int8",
            "window(40kB)+int8")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Two layers, two key heads of 32."""
    return load(str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Four layers, of which two see 90 tokens only."""
    return load(str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", "gemma3_text", num_hidden_layers=4,
                               sliding_window=90, head_dim=32, query_pre_attn_scalar=32,
                               max_position_embeddings=2048)))


class Fed:
    """A cache that real tokens are fed to, and the most bytes that were in use in it at any one time."""

    def __init__(self, loaded, spec, monkeypatch):
        self.model, self.cache, self.peak = loaded.model, KVCache(loaded.config, spec, loaded.dtype), 0
        take = PageStore.reserve

        def reserve(store, held, count):
            take(store, held, count)
            self.peak = max(self.peak, self.cache.used_bytes)

        monkeypatch.setattr(PageStore, "reserve", reserve)

    def prompt(self, count):
        row = self.cache.add()
        ids = torch.randint(4, 200, (1, count), generator=torch.Generator().manual_seed(0))
        for start in range(0, count, CHUNK):
            stop = min(start + CHUNK, count)
            ends = stop == count
            batch = Batch(self.cache, [row], "prefill_end" if ends else "prefill", defers=ends)
            self.model(ids[:, start:stop], cache=batch, last=torch.tensor([stop - start - 1]))
            for _ in finish_prompt(self.model, batch, ids[0].tolist()) if ends else ():
                pass
        return row

    def decode(self, rows, count):
        for at in range(count):
            self.model(torch.full((len(rows), 1), 4 + at % 200), cache=Batch(self.cache, rows, "decode"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kv", SETTINGS)
@pytest.mark.parametrize("prompt, decoded", [(1, 63), (200, 150), (129, 260)])
@torch.inference_mode()
def test_what_a_sequence_holds_from_its_prompt_on(loaded, kv, prompt, decoded, monkeypatch):
    spec = parse_kv(kv)
    found = footprint(loaded.config, spec, loaded.dtype, prompt + decoded, prompt, CHUNK)
    fed = Fed(loaded, spec, monkeypatch)
    row = fed.prompt(prompt)
    fed.peak = fed.cache.used_bytes
    fed.decode([row], decoded)
    assert found.bytes_per_token == fed.cache.bytes_per_token
    assert found.residual_bytes_per_token == fed.cache.residual_bytes_per_token
    if fed.cache.policy.query_window:  # layers act one after another
        spare = 2 if fed.cache.policy.uniform_budget else 2 + found.layers * found.heads
        assert fed.peak <= found.sequence_bytes <= fed.peak + spare * sum(found.groups[0].page_bytes)
    else:
        assert fed.peak == found.sequence_bytes
    assert fed.cache.allocated_bytes <= found.allocated_bytes(1)


@pytest.mark.parametrize("kv", SETTINGS)
@torch.inference_mode()
def test_what_a_prompt_holds_while_it_comes_in(loaded, kv, monkeypatch):
    spec = parse_kv(kv)
    found = footprint(loaded.config, spec, loaded.dtype, 390, 100, CHUNK)
    fed = Fed(loaded, spec, monkeypatch)
    fed.prompt(390)
    most = found.layers * found.heads * found.groups[0].filling.bytes
    if fed.cache.policy.query_window:
        assert fed.peak <= most <= fed.peak + found.heads * CHUNK // 64 * sum(found.groups[0].page_bytes)
    else:
        assert fed.peak == most
    assert fed.cache.allocated_bytes <= found.allocated_bytes(1)


@pytest.mark.parametrize("kv", ["none", "int8", "int4", "int2(residual_length=100, sinks=70)", "window(100)",
                                "rotation(3)"])
@torch.inference_mode()
def test_the_worst_case_of_three_is_met_to_the_byte(loaded, kv, monkeypatch):
    """Two that decode together, as long as they may become, and a third whose prompt is as long as that."""
    spec, length = parse_kv(kv), 400
    found = footprint(loaded.config, spec, loaded.dtype, length, length // 2, CHUNK)
    assert found.groups[0].filling.bytes >= found.groups[0].decoding.bytes
    fed = Fed(loaded, spec, monkeypatch)
    rows = [fed.prompt(length // 2) for _ in range(2)]
    fed.decode(rows, length // 2)
    fed.prompt(length)
    assert fed.peak <= found.used_bytes(3)
    gone = 2 * (found.sequence_bytes - sum(map(sum, held_bytes(fed.cache, found, rows))) // 2)
    assert fed.peak + gone == found.used_bytes(3), "but for what the two gave back after their last step"
    assert fed.cache.allocated_bytes <= found.allocated_bytes(3)


def held_bytes(cache, found, rows):
    """Bytes of the pages of these sequences, by row, then layer."""
    for row in rows:
        sizes = found.groups[0].page_bytes
        yield [sum(len(own) * size for kind, size in zip((layer.pages, layer.residual), sizes)
                   for own in kind)
               for layer in Batch(cache, [row]).sequences[0].layers]


def test_plain_pages_are_arithmetic():
    """32 layers of 4,096 numbers, key and value, in 16 bits: half a megabyte a token, a gigabyte at 2,000."""
    config = parse_config({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
                           "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    found = footprint(config, parse_kv("none"), torch.float16, 2000, 1000, 512)
    assert found.bytes_per_token == 2 * 262_144 == 2**19
    assert found.sequence_bytes == 2048 * 2**19 == 2**30  # whole pages of 64
    assert found.used_bytes(3) == 3 * 2**30
    assert 3 * 2**30 <= found.allocated_bytes(3) <= 3 * 2**30 * 9 / 8
    assert found.moving_bytes(3) == 3 * 2**30 / 32


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", [
    "none", "int8", "int4", "window(150, sinks=4)", "window(60)+int8", "window(0.2MB)", "snapkv(0.5)",
    "snapkv(0.6MB)+int4", "tova(90, interval=8)", "h2o(0.3, interval=16)+int8", "kvzip(0.5, chunk=100)"])
@pytest.mark.parametrize("prompt, decoded", [(60, 20), (500, 450)])
@torch.inference_mode()
def test_layers_with_a_window_of_the_models_own(hybrid, kv, prompt, decoded, monkeypatch):
    """Kinds of layers aren't at their worst in the same step: no more than predicted, not much less."""
    spec = parse_kv(kv)
    found = footprint(hybrid.config, spec, hybrid.dtype, prompt + decoded, prompt, CHUNK)
    fed = Fed(hybrid, spec, monkeypatch)
    row = fed.prompt(prompt)
    assert fed.peak <= found.used_bytes(1)
    fed.peak = fed.cache.used_bytes
    fed.decode([row], decoded)
    assert found.bytes_per_token == fed.cache.bytes_per_token
    spare = 2 * found.layers * found.heads * max(sum(kind.page_bytes) for kind in found.groups)
    assert fed.peak <= found.sequence_bytes <= fed.peak + spare
    assert fed.cache.allocated_bytes <= found.allocated_bytes(1)
    fed.decode([row], 64)
    lengths = [max(heads) for heads in fed.cache.slots(row)]
    assert max(lengths[0::2]) <= 90 + 255 + 63, "what is behind a window is given back"
    if kv in ("none", "int8", "int4"):
        assert lengths[1::2] == [prompt + decoded + 64] * 2


def test_where_all_layers_have_a_window_a_policy_is_for_all():
    config = parse_config({"model_type": "mistral", "vocab_size": 320, "hidden_size": 64,
                           "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                           "num_key_value_heads": 2, "sliding_window": 64})
    plain = dataclasses.replace(config, sliding_windows=(None, None))

    def of(config, kv):
        return footprint(config, parse_kv(kv), torch.bfloat16, 512, 256, 512)

    none, window = of(config, "none"), of(config, "window(64, sinks=0)")
    assert window.slots == 64 + 63 and none.slots == 64 + 256
    assert of(config, "snapkv(0.5)").sequence_bytes == of(plain, "snapkv(0.5)").sequence_bytes
    assert of(config, "window(32)").sequence_bytes == of(plain, "window(32)").sequence_bytes
    assert of(config, "window(99)").sequence_bytes == none.sequence_bytes


@pytest.mark.parametrize("context, prompt", [(1, 1), (64, 1), (65, 64), (100_000, 3), (100_000, 99_999)])
def test_a_long_sequence_is_no_more_work_and_no_other_result(context, prompt):
    """What is skipped of a long one changes nothing: pages are counted in closed form where there is one."""
    config = parse_config({"model_type": "llama", "vocab_size": 320, "hidden_size": 64,
                           "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
                           "num_key_value_heads": 1})
    found = footprint(config, parse_kv("int8"), torch.bfloat16, context, prompt, 512)
    assert found.sequence_bytes == -(-context // 64) * 64 * found.bytes_per_token
    residual_slots = footprint(config, parse_kv("int4"), torch.bfloat16, context, prompt, 512)
    assert residual_slots.groups[0].decoding.codes == max(0, -(-(context - 127) // 64)) - (context > 127)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kv", ["snapkv(0.5)", "tova(0.5)", "h2o(0.25, interval=24)+int4",
                                "window(1000)+int8"])
def test_a_long_answer_is_predicted_in_a_few_steps(loaded, kv, monkeypatch):
    steps = []
    monkeypatch.setattr(footprint_module, "Batch",
                        lambda *given, **options: steps.append(given[2]) or Batch(*given, **options))
    config = dataclasses.replace(loaded.config, max_position_embeddings=1 << 17)
    long = footprint(config, parse_kv(kv), loaded.dtype, 100_000, 4_000, CHUNK)
    assert steps.count("decode") < 1000
    if "snapkv" in kv:  # what is decoded stays, and is there at the end
        assert long.slots == 2_000 + 96_000
    else:  # an answer of any length takes the same
        monkeypatch.setattr(footprint_module, "_repeats", lambda *given: False)
        whole = footprint(config, parse_kv(kv), loaded.dtype, 6_000, 4_000, CHUNK)
        assert long.groups[0].decoding == whole.groups[0].decoding


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv", ["snapkv(0.5)", "expected(0.5)+int8", "adakv(60)+int4", "h2o(0.5)"])
@torch.inference_mode()
def test_queries_give_their_memory_back_when_the_prompt_ends(tmp_path, kv, dtype):
    """As one program and operation by operation."""
    model = load(str(tiny_model(tmp_path / "tiny", head_dim=32)), dtype=dtype)
    cache = KVCache(model.config, parse_kv(kv), model.dtype)
    row = cache.add()
    ids = torch.randint(4, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    for some, phase in ((ids[:, :200], "prefill"), (ids[:, 200:], "prefill_end")):
        model.model(some, cache=Batch(cache, [row], phase), last=torch.tensor([some.shape[1] - 1]))
        watched = cache.sequence(row).tracked_bytes
        assert (watched > 0) == (phase == "prefill" or kv.startswith("h2o")), phase


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kv", ["none", "int4", "window(100, sinks=4)+int4", "window(700)"])
@pytest.mark.parametrize("context, prompt, chunk", [(3001, 2500, 128), (2048, 2047, 384), (4000, 3300, 200)])
def test_a_long_prompt_behind_windows_is_predicted_by_its_last_chunks(hybrid, kv, context, prompt, chunk,
                                                                      monkeypatch):
    config = dataclasses.replace(hybrid.config, sliding_windows=(300, None, 300, None))
    found = footprint(config, parse_kv(kv), hybrid.dtype, context, prompt, chunk)

    def steps(prompt, decoded, chunk, *given):
        for at in range(0, prompt, chunk):
            yield min(chunk, prompt - at), "prefill" if at + chunk < prompt else "prefill_end", True
        yield from [(1, "decode", True)] * decoded

    monkeypatch.setattr(footprint_module, "_steps", steps)
    monkeypatch.setattr(footprint_module, "_repeats", lambda *given: False)
    assert found == footprint(config, parse_kv(kv), hybrid.dtype, context, prompt, chunk)


class Listed(SnapKV):
    """An option that can't be hashed."""

    name: ClassVar[str] = "listed"
    extra: list[int] = Field(default_factory=lambda: [1])


@torch.inference_mode()
def test_a_policy_may_have_options_of_any_type(hybrid, loaded, monkeypatch):
    kinds = type(registry("kv_policies"))
    get = kinds.get
    monkeypatch.setattr(kinds, "get", lambda self, name: Listed if name == "listed" else get(self, name))
    spec = KVSpec(policy="listed", options={"budget": 0.5})
    for model in (hybrid, loaded):
        found = footprint(model.config, spec, model.dtype, 300, 200, CHUNK)
        assert found.sequence_bytes == footprint(
            model.config, parse_kv("snapkv(0.5)"), model.dtype, 300, 200, CHUNK).sequence_bytes
        cache = KVCache(model.config, spec, model.dtype)
        model.model._model(torch.arange(4, 104)[None], cache=Batch(cache, [cache.add()], "prefill_end"))


@pytest.mark.parametrize("kv, own", [("none", [90]), ("window(90, sinks=4)", []), ("window(50)", []),
                                     ("window(91)", [90]), ("snapkv(0.5)", [90])])
def test_which_layers_hold_their_own_window(hybrid, kv, own):
    found = footprint(hybrid.config, parse_kv(kv), hybrid.dtype, 500, 400, CHUNK)
    assert [kind.window for kind in found.groups if kind.model_window] == own
    assert found.layers == 4 and not found.groups[0].model_window
