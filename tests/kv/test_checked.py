"""What strangers' policies and codecs return is checked where they act, and they are named."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from quantkit.errors import PluginError, QuantkitError
from quantkit.hookspecs import hookimpl
from quantkit.kv.base import KVCodec, KVPolicy
from quantkit.kv.cache import KVCache
from quantkit.kv.checked import KERNEL_NAMES, is_ours
from quantkit.kvspec import parse_kv
from quantkit.plugins import current, registry
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
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


def test_a_built_ins_name_with_other_code_is_refused(loaded, stranger):
    side = Doubtful()
    side.name = "int8"
    stranger(codec=codec_of(side))
    with pytest.raises(PluginError, match="KV codec 'odd' of dist-odd: a side of it is called 'int8'"):
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
