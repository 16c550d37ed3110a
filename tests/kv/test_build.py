"""Settings that make a policy and a codec, and those that don't."""

from __future__ import annotations

import pytest

from quantkit.kv.base import KVCodec, KVPolicy
from quantkit.kv.build import build_codec, build_kv_codecs, build_policy
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.plugins.manager import registry
from quantkit.support.errors import QuantkitError, UsageError


def test_every_policy_with_every_codec():
    budgets = {"all": {}}
    for policy in registry("kv_policies"):
        for codec in registry("kv_codecs"):
            spec = KVSpec(policy=policy, options=budgets.get(policy, {"budget": 16}), codec=codec)
            assert isinstance(build_policy(spec), KVPolicy) and build_policy(spec).name == policy
            made = build_codec(codec, {})
            assert isinstance(made, KVCodec) and made.name == codec


@pytest.mark.parametrize(("text", "said"), [
    ("window", "budget"), ("window(0)", "budget"), ("window(-5)", "budget"), ("window(2.5)", "budget"),
    ("window(wide)", "budget"), ("window(true)", "budget"), ("window(8, sinks=-1)", "sinks"),
    (f"window({10**30})", "budget"), ("window(8, sink=4)", "did you mean 'sinks'"),
    ("snapkv", "budget"), ("snapkv(0)", "budget"), ("snapkv(-0.5)", "budget"), ("snapkv(true)", "budget"),
    ("snapkv(inf)", "budget"), ("snapkv(nan)", "budget"), ("snapkv(1e300)", "budget"),
    ("snapkv(0.5, window=0)", "window"), ("snapkv(0.5, kernel=0)", "kernel"),
    ("snapkv(0.5, kernel=1000000)", "kernel"), ("tova(0)", "budget"), ("tova(8, interval=0)", "interval"),
    ("all(5)", "budget"), ("all(x=1)", "x")])
def test_bad_options_are_named(text, said):
    with pytest.raises(UsageError) as caught:
        build_policy(parse_kv(text))
    assert said in str(caught.value).lower() and text.split("(")[0] in caught.value.what


@pytest.mark.parametrize("spec", [KVSpec(policy="widow"), KVSpec(codec="int9")])
def test_unknown_names(spec):
    with pytest.raises(QuantkitError):
        build_policy(spec)
        build_kv_codecs(spec)


@pytest.mark.parametrize(("text", "said"), [
    ("int8(4)", "no option 'bits'"), ("int8(residual_lenght=4)", "did you mean 'residual_length'"),
    ("int4(residual_length=-1)", "residual_length"),
    ("int4(sinks=1.5)", "sinks"), ("rotation(5)", "bits"), ("rotation(2.2)", "bits"), ("rotation(x)", "bits"),
    ("int8/int4(residual_length=x)", "residual_length")])
def test_bad_options_of_codecs_are_named(text, said):
    with pytest.raises(UsageError) as caught:
        build_kv_codecs(parse_kv(text))
    assert said in str(caught.value).lower()


def test_two_codecs_wait_as_long_as_the_longer_asks():
    codings = build_kv_codecs(parse_kv(
        "int4(residual_length=10, sinks=70)/rotation(2, residual_length=40, sinks=0)"))
    assert (codings.keys.name, codings.values.name) == ("channel4", "hadamard2")
    assert (codings.residual_length, codings.first) == (40, 128)


def test_a_codec_that_does_not_say_how_keys_are_stored_cannot_be_made():
    class Half(KVCodec):
        name = "half"

    with pytest.raises(TypeError, match="keys"):
        Half()


@pytest.mark.parametrize(("kind", "said"), [(int, "isn't a KVCodec"), ("sides", "isn't a SideCodec")])
def test_a_plugin_made_for_another_version_is_named(monkeypatch, kind, said):
    class Sides(KVCodec):
        name = "int8"

        def keys(self):
            return 8

    class Table:
        def get(self, name):
            return Sides if kind == "sides" else kind

    monkeypatch.setattr("quantkit.kv.build.registry", lambda table: Table())
    with pytest.raises(UsageError) as caught:
        build_kv_codecs(KVSpec(codec="int8"))
    assert "'int8'" in caught.value.what and said in str(caught.value.why)
    assert "plugins.md" in str(caught.value.next)
