"""What strangers' policies and codecs return is checked where they act, and they are named."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.evaluation.quality.feed import prefill
from quantkit.kv.base import KERNEL_NAMES, KVCodec, KVPolicy, is_ours
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import current, registry
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import PluginError, QuantkitError
from quantkit.testing import tiny_model
from quantkit_kernels.cpu.kv_codecs import CODECS


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(tiny_model(tmp_path_factory.mktemp("checked") / "tiny")))


@pytest.fixture
def stranger():
    """``stranger(policy=…, codec=…)`` registers it in a manager that only this test sees."""
    current.cache_clear()

    def add(**things):
        class Plugin:
            @hookimpl
            def register_kv_policies(self, register):
                if "policy" in things:
                    register("odd", things["policy"])

            @hookimpl
            def register_kv_codecs(self, register):
                if "codec" in things:
                    register("odd", things["codec"])

        current().add(Plugin(), "dist-odd", version="3")

    yield add
    current.cache_clear()


def answer(loaded, kv):
    """Tokens of a request that is served with a KV setting."""
    engine = Engine(loaded, kv=parse_kv(kv), max_batch=1, context=256)
    request = engine.submit(list(range(4, 104)), Sampling(max_tokens=8, ignore_eos=True))
    while engine.step():
        pass
    return request.result.token_ids


def test_a_policy_that_keeps_nonsense_is_named(loaded, stranger):
    class Odd(KVPolicy):
        name: ClassVar[str] = "odd"
        on_prefill: ClassVar = "end"

        def keep(self, view):
            return torch.full((len(view.lengths), 1), 100_000)

    stranger(policy=Odd)
    with pytest.raises(PluginError, match=r"'odd' of dist-odd: keep\(\) returned slot 100000 of head 0"):
        answer(loaded, "odd")


class Doubtful:
    """8 bits a number; its decode may be told to give NaN from now on."""

    name, hadamard, broken = "doubtful", False, False

    def layout(self, dim, dtype):
        return {"codes": ((dim,), torch.int8), "scale": ((), torch.float32)}

    def shared(self, dim, dtype):
        return {}

    def encode(self, x):
        scale = (x.float().abs().amax(-1) / 127).clamp(min=1e-30)
        return {"codes": (x.float() / scale[..., None]).round().to(torch.int8), "scale": scale}

    def decode(self, parts):
        return parts["codes"].float() * parts["scale"][..., None] * (torch.nan if self.broken else 1)


def codec_of(side):
    return type("Odd", (KVCodec,), {"__module__": __name__, "name": "odd", "keys": lambda self: side})


def test_a_codec_that_decodes_nan_is_blamed_and_the_weights_are_not(loaded, stranger):
    side = Doubtful()
    stranger(codec=codec_of(side))
    assert len(answer(loaded, "odd")) == 8
    engine = Engine(loaded, kv=parse_kv("odd"), max_batch=1, context=256)
    side.broken = True  # after the cache was made and its codec tried
    engine.submit(list(range(4, 104)), Sampling(max_tokens=8, ignore_eos=True))
    with pytest.raises(QuantkitError) as caught:
        while engine.step():
            pass
    assert "KV codec 'odd' of dist-odd" in caught.value.what and "aren't finite" in caught.value.what
    assert "weights are not the cause" in caught.value.why


def test_values_that_overflow_are_not_blamed_on_a_sound_codec(tmp_path, stranger):
    folder = tiny_model(tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][0] = 3e38  # finite, but its products aren't
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stranger(codec=codec_of(Doubtful()))
    with pytest.raises(QuantkitError) as caught:
        answer(load(str(folder)), "odd")
    assert "not the cause" not in str(caught.value.why) and "its dtype overflows" in str(caught.value.why)


class Step:
    """Whole steps of a size that its name doesn't say."""

    name, hadamard = "steps", False

    def __init__(self, size):
        self.size = size

    def layout(self, dim, dtype):
        return {"codes": ((dim,), torch.int8)}

    def shared(self, dim, dtype):
        return {}

    def encode(self, x):
        return {"codes": (x.float() / self.size).round().clamp(-127, 127).to(torch.int8)}

    def decode(self, parts):
        return parts["codes"].to(torch.bfloat16) * self.size


def test_sides_of_one_name_and_other_bytes_are_refused(loaded, stranger):
    kind = codec_of(Step(0.1))
    kind.values = lambda self: Step(0.02)
    stranger(codec=kind)
    with pytest.raises(PluginError, match="stored in other bytes under the same name 'steps'"):
        KVCache(loaded.config, parse_kv("odd"))


def test_a_policy_sees_the_same_whether_pages_are_kept_decoded_or_not(loaded, stranger):
    """Also of a codec that decodes to bfloat16."""
    stranger(codec=codec_of(Step(0.05)))
    seen = []
    for limit in (1 << 30, 0):
        cache = KVCache(loaded.config, parse_kv("odd"), loaded.dtype)
        cache.decoded.bound(limit)
        row = cache.add(100)
        prefill(loaded, cache, row, list(range(4, 104)))
        layer = cache.layers[0]
        seen.append(layer.view(cache.sequence(row).layers[0]).keys())
    assert seen[0].dtype == seen[1].dtype == torch.float32 and torch.equal(*seen)


def test_a_built_ins_name_with_other_code_is_refused(loaded, stranger):
    side = Doubtful()
    side.name = "int8"
    stranger(codec=codec_of(side))
    with pytest.raises(PluginError, match="KV codec 'odd' of dist-odd: a side of it is called 'int8'"):
        KVCache(loaded.config, parse_kv("odd"))


@pytest.mark.parametrize(("declared", "words"), [
    ({"on_prefill": "bogus"}, "on_prefill is 'bogus'"), ({"tracks": "attention_sum"}, "query_window queries"),
    ({"decode_interval": property(lambda self: -3)}, "decode_interval is -3"),
    ({"query_window": property(lambda self: -1)}, "query_window is -1"),
    ({"visible": property(lambda self: 5)}, "visible is 5"),
    ({"slack": property(lambda self: -70)}, "slack is -70"),
    ({"reread_prompt": property(lambda self: 0)}, "reread_prompt is 0"),
    ({"release_granularity": 0}, "release_granularity is 0")])
def test_a_policy_that_declares_nonsense_is_refused_when_it_is_made(loaded, stranger, declared, words):
    stranger(policy=type("Odd", (KVPolicy,), {
        "__module__": __name__, "name": "odd", "on_prefill": "end", **declared}))
    with pytest.raises(PluginError, match=words) as caught:
        KVCache(loaded.config, parse_kv("odd"))
    assert caught.value.what.startswith("KV policy 'odd' of dist-odd")
    assert caught.value.next.startswith("quantkit plugins check dist-odd")


@pytest.mark.parametrize("value", [-5, "x"])
def test_a_codec_with_a_length_that_is_none_is_refused(loaded, stranger, value):
    kind = type("Odd", (KVCodec,), {"__module__": __name__, "__annotations__": {"residual_length": object},
                                    "residual_length": value, "name": "odd", "keys": lambda self: Doubtful()})
    stranger(codec=kind)
    with pytest.raises(PluginError, match=f"'odd' of dist-odd: residual_length is {value!r}"):
        KVCache(loaded.config, parse_kv("odd"))


def test_a_class_that_calls_itself_something_else_is_refused(loaded, stranger):
    kind = codec_of(Doubtful())
    kind.name = "even"
    stranger(codec=kind)
    with pytest.raises(PluginError, match="'odd' of dist-odd calls itself 'even'"):
        KVCache(loaded.config, parse_kv("odd"))


def test_all_names_that_kernels_know_are_reserved():
    sides = [side for name in registry("kv_codecs") for made in (registry("kv_codecs").get(name)(),)
             for side in (made.keys(), made.values())]
    assert all(is_ours(side) for side in sides)
    assert {side.name for side in sides} | set(CODECS) <= KERNEL_NAMES
    assert KERNEL_NAMES - {"none"} == set(CODECS)
