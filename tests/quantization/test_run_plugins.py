"""Quantizing with plugins: observers, methods of strangers, the notes that they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantkit import __version__
from quantkit.checkpoint.reader import Checkpoint
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import current, registry
from quantkit.quantization.methods.base import LayerStats, Method
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.support.errors import QuantkitError, SpecError, Stopped
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Two layers, tied embeddings."""
    return tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def plugin():
    """``plugin(object)`` registers it in a manager that only this test sees."""
    current.cache_clear()
    yield lambda thing: current().add(thing, "stranger", version="7")
    current.cache_clear()


def falls_back(weight, stats, spec, options):
    assert stats is None, "a data-free method was given statistics"
    rounded = registry("methods").get("rtn")
    return replace(rounded.run(weight, None, spec, rounded.options()), notes=("rounded instead",))


class Odd:
    @hookimpl
    def register_methods(self, register):
        register("odd", Method("odd", "https://example.org", falls_back))


ODD = """
calibration: {windows: 2, window: 16}
rules:
  - {match: "*.k_proj", method: odd, spec: {bits: 4, granularity: {strategy: channel}}}
  - {match: "*", method: gptq, spec: {bits: 4, granularity: {strategy: channel}}}
"""


def test_notes_are_kept_and_strict_makes_them_errors(llama, tmp_path, plugin):
    plugin(Odd())
    recipe = tmp_path / "odd.yaml"
    recipe.write_text(ODD)
    result = quantize(str(llama), str(recipe), tmp_path / "out")
    assert result.fallbacks == tuple(f"model.layers.{i}.self_attn.k_proj: rounded instead" for i in (0, 1))
    with Checkpoint.open(result.out) as checkpoint:
        assert checkpoint.manifest.plugins == {"quantkit": __version__, "stranger": "7"}
        assert [row.notes for row in checkpoint.manifest.layers if row.notes] == [("rounded instead",)] * 2
    with pytest.raises(QuantkitError, match=r"layers\.0\.self_attn\.k_proj: rounded instead") as caught:
        quantize(str(llama), str(recipe), tmp_path / "strict", strict=True)
    assert "--strict" in caught.value.why


def test_strict_minds_the_layers_of_an_earlier_attempt_too(llama, tmp_path, plugin, stop_at):
    plugin(Odd())
    recipe = tmp_path / "odd.yaml"
    recipe.write_text(ODD)
    with pytest.raises(Stopped):
        quantize(str(llama), str(recipe), tmp_path / "out", progress=stop_at("embeddings and head"))
    with pytest.raises(QuantkitError, match="rounded instead"):
        quantize(str(llama), str(recipe), tmp_path / "out", strict=True)


def test_observers_are_told(llama, tmp_path, plugin):
    seen, ends = [], []

    class Observer:
        @hookimpl
        def on_layer_quantized(self, name, row):
            seen.append((name, row))

        @hookimpl
        def on_run_finished(self, kind, summary):
            ends.append((kind, summary))

    plugin(Observer())
    result = quantize(str(llama), "int8", tmp_path / "out")
    assert seen == [(row.name, row.to_dict()) for row in result.rows]
    assert ends == [("quantize", result.to_dict())]


def test_an_observer_that_fails_costs_a_warning_only(llama, tmp_path, plugin):
    class Observer:
        @hookimpl
        def on_run_finished(self, kind, summary):
            raise RuntimeError("no")

    plugin(Observer())
    with pytest.warns(UserWarning, match="on_run_finished: RuntimeError: no"):
        assert verify(quantize(str(llama), "int8", tmp_path / "out").out).ok


def test_a_refusal_inside_a_strangers_method_names_the_layer(llama, tmp_path, plugin):
    def refuse(weight, stats: LayerStats | None, spec, options):
        raise SpecError("no grid", why="because", next="try rtn")

    class Bad:
        @hookimpl
        def register_methods(self, register):
            register("bad", Method("bad", "https://example.org", refuse))

    plugin(Bad())
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("rules: [{match: '*', method: bad, spec: {bits: 4, granularity: {strategy: channel}}}]")
    with pytest.raises(SpecError) as caught:
        quantize(str(llama), str(recipe), tmp_path / "out")
    assert caught.value.what == "model.layers.0.self_attn.q_proj: no grid"
    assert (caught.value.why, caught.value.next) == ("because", "try rtn")
