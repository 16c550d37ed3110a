"""Plugin code that fails nowhere and returns what quantkit can't use: the plugin is named where it is met."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from quantkit.formats.bnb_int8 import FORMAT
from quantkit.kv.policies.snapkv import SnapKV
from quantkit.kv.spec import parse_kv
from quantkit.models.families import LLAMA
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import current, registry
from quantkit.quantization.methods.base import Method
from quantkit.quantization.run import quantize
from quantkit.quantization.transforms.base import Transform
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.sources.base import SourceKind
from quantkit.sources.open import open_source
from quantkit.sources.wrapper import SourceWrapper
from quantkit.support.errors import PluginError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def stranger():
    """``stranger("methods", thing)`` registers it as ``odd`` of dist-odd, for this test alone."""
    current.cache_clear()

    def add(kind, thing):
        plugin = type("Plugin", (), {f"register_{kind}": hookimpl(
            lambda self, register: register("odd", thing))})
        plugin.__dict__[f"register_{kind}"].__name__ = f"register_{kind}"
        current().add(plugin(), "dist-odd", version="3")

    yield add
    current.cache_clear()


def whole(source):
    """A source as it must be."""
    class Whole(SourceWrapper):
        def config(self):
            return self._source.config()

        def tensors(self):
            return self._source.tensors()

        def tensor(self, name):
            return self._source.tensor(name)

    return Whole(source)


def odd_source(tiny, **returned):
    """A kind of source that gives a tiny model, but for the methods that are named."""
    def opened(uri, revision):
        source = whole(open_source(str(tiny)))
        for method, value in returned.items():
            setattr(source, method, lambda *_, value=value: value)
        return source

    return SourceKind(lambda uri: uri == "odd:", opened, "odd:", order=1)


@pytest.mark.parametrize(("method", "value", "words"), [
    ("config", [], r"config\(\) returned a list"), ("tensors", None, r"tensors\(\) returned a NoneType"),
    ("tensors", {"a": 1}, r"tensors\(\) returned a dict, not a mapping of names to TensorInfo"),
    ("tensor", None, r"tensor\('.*'\) returned a NoneType"),
    ("tensor", torch.zeros(1), r"tensor\('.*'\) is torch.float32"),
    ("side_files", None, r"side_files\(\) returned a NoneType"),
    ("identity", None, r"identity\(\) returned a NoneType")])
def test_a_source(stranger, tiny, tmp_path, method, value, words):
    stranger("sources", odd_source(tiny, **{method: value}))
    with pytest.raises(PluginError, match=words) as caught:
        quantize("odd:", "int8", tmp_path / "OUT")
    assert "source 'odd' of dist-odd" in caught.value.what


def test_a_source_as_it_must_be_is_quantized(stranger, tiny, tmp_path):
    stranger("sources", odd_source(tiny))
    assert quantize("odd:", "int8", tmp_path / "OUT").rows


def test_an_architecture(stranger, tmp_path):
    folder = tiny_model(tmp_path / "odd")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"odd"'))
    stranger("architectures", replace(LLAMA, model_type="odd", parse=lambda config: None))
    with pytest.raises(PluginError, match="'odd' of dist-odd: parse returned a NoneType"):
        load(str(folder))


def recipe(folder, text):
    path = folder / "odd.yaml"
    path.write_text(text)
    return str(path)


def changed(name, tensor):
    def layer(config, index, tensors, options):
        tensors.changed[name] = tensor

    return layer


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(("fields", "words"), [
    ({"source": lambda source, config, options: None}, "gave a NoneType, which isn't a source"),
    ({"layer": changed("bogus", torch.ones(1))}, "changes 'bogus', which the model doesn't have"),
    ({"layer": changed(NORM, torch.ones(3))}, r"became \[3\]; it is \[64\]"),
    ({"layer": changed(NORM, None)}, "became a NoneType")])
def test_a_transform(stranger, tiny, tmp_path, fields, words):
    stranger("transforms", Transform("odd", "https://example.org", needs=frozenset({"largest"}), **fields))
    text = ("calibration: {windows: 2, window: 16}\ntransforms: [{name: odd}]\n"
            "rules: [{match: '*', method: gptq, spec: {bits: 4, granularity: {strategy: channel}}}]")
    with pytest.raises(PluginError, match=words) as caught:
        quantize(str(tiny), recipe(tmp_path, text), tmp_path / "OUT")
    assert "transform 'odd' of dist-odd" in caught.value.what


class OddFormat(type(FORMAT)):
    name = "odd"

    def layout(self, spec, shape, dtype):
        return None


def test_a_format(stranger, tiny, tmp_path):
    stranger("formats", OddFormat())
    text = ("rules: [{match: '*', method: rtn, format: odd, "
            "spec: {bits: 8, granularity: {strategy: channel}}}]")
    with pytest.raises(PluginError, match="format 'odd' of dist-odd: layout returned None"):
        quantize(str(tiny), recipe(tmp_path, text), tmp_path / "OUT")


@pytest.mark.parametrize(("method", "words"), [
    (Method("odd", "https://example.org", lambda *_: None, options=dict), "has options of <class 'dict'>"),
    (Method("odd", "https://example.org", lambda weight: None),
     r"quantize takes \(weight, stats, spec, options\)")])
def test_a_method(stranger, tiny, tmp_path, method, words):
    stranger("methods", method)
    text = "rules: [{match: '*', method: odd, spec: {bits: 8, granularity: {strategy: channel}}}]"
    with pytest.raises(PluginError) as caught:
        quantize(str(tiny), recipe(tmp_path, text), tmp_path / "OUT")
    assert "'odd' of dist-odd" in caught.value.what
    assert re.search(words, f"{caught.value.what} {caught.value.why}")


@pytest.mark.parametrize(("method", "value", "words"), [
    ("layer_budget", 3.5, r"layer_budget\(\) returned 3.5"),
    ("select", None, r"keep\(\) returned a NoneType")])
def test_a_policy(stranger, tiny, method, value, words):
    kind = type("Odd", (SnapKV,), {"__module__": __name__, "__annotations__": {"name": ClassVar[str]},
                                   "name": "odd", method: lambda self, *_: value})
    stranger("kv_policies", kind)
    assert registry("kv_policies").get("odd") is kind
    engine = Engine(load(str(tiny)), kv=parse_kv("odd(0.5)"), max_batch=1, context=256)
    engine.submit(list(range(4, 104)), Sampling(max_tokens=4, ignore_eos=True))
    with pytest.raises(PluginError, match=words) as caught:
        while engine.step():
            pass
    assert "'odd' of dist-odd" in caught.value.what
