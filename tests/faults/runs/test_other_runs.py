"""A run that isn't the one that was begun there is refused, with what differs and what to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from quantkit.plugins.manager import current
from quantkit.quantization import run as module
from quantkit.quantization.run import quantize
from quantkit.support.errors import CheckpointError, Stopped
from quantkit.testing import tiny_model

RECIPE = {
    "name": "mine", "calibration": {"windows": 4, "window": 16, "importance": "equal"},
    "rules": [{"match": "lm_head", "optional": True},
              {"match": "*.v_proj", "method": "hqq",
               "spec": {"bits": 4, "granularity": {"strategy": "channel"}}},
              {"match": "*", "method": "gptq", "options": {"damp": 0.01},
               "spec": {"bits": 4, "granularity": {"strategy": "group", "size": 32}}}]}


@pytest.fixture
def begin(tiny, text, tmp_path):
    """``begin()`` begins a run and stops it; ``begin(model, change, text)`` wants to take it over."""
    (tmp_path / "text.txt").write_text(text.read_text())

    def start(model=tiny, change=lambda recipe: None, progress=lambda event: None):
        recipe = json.loads(json.dumps(RECIPE))
        recipe["calibration"]["text"] = str(tmp_path / "text.txt")
        change(recipe)
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        return quantize(str(model), str(tmp_path / "recipe.yaml"), tmp_path / "out", progress=progress)

    def stop(event):
        if event.label == "layer 1":
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        start(progress=stop)
    return start


@pytest.fixture
def refused(begin, tmp_path):
    """``refused(model, change)`` → the lines of the difference; the run that was begun is as it was."""
    partial = tmp_path / "out.partial"

    def lines(model=None, change=lambda recipe: None):
        before = {path.name: path.read_bytes() for path in partial.iterdir() if path.is_file()}
        with pytest.raises(CheckpointError, match="belongs to another run") as caught:
            begin(**{"model": model} if model else {}, change=change)
        assert before == {path.name: path.read_bytes() for path in partial.iterdir() if path.is_file()}
        head, *found = caught.value.why.split("\n")
        assert head == "it was begun with (then → now):" and 1 <= len(found) <= 8
        assert f"drop that run: rm -r {partial}" in caught.value.next
        lines.next = caught.value.next
        return [line.strip() for line in found]

    return lines


def install(monkeypatch, distribution, version):
    """Another version, as the plugins' manager sees it."""
    plugins = [replace(one, version=version) if one.distribution == distribution else one
               for one in current().plugins]
    monkeypatch.setattr(current(), "plugins", plugins)


def test_another_model(refused, tmp_path, tiny):
    other = tiny_model(tmp_path / "other", hidden_size=64, intermediate_size=64, num_attention_heads=2,
                       num_key_value_heads=2, seed=1)
    found = refused(other)
    assert found[0] == "model: tiny → other"
    assert any(line.startswith("the model's model.safetensors: ") for line in found) and len(found) == 2
    same = shutil.copytree(tiny, tmp_path / "elsewhere" / "tiny")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rope_theta": 5e4}))
    (line,) = refused(same)
    assert line.startswith("the model's config.json: ")


def test_a_model_that_changed_where_it_lies(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")

    def run(progress=lambda event: None):
        return quantize(str(model), "int4-rtn", tmp_path / "out", progress=progress)

    def stop(event):
        if event.label == "layer 1":
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        run(stop)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="belongs to another run") as caught:
        run()
    assert "the model's model.safetensors: " in caught.value.why


def test_the_same_model_elsewhere_is_the_same_run(begin, tiny, tmp_path):
    begin(shutil.copytree(tiny, tmp_path / "elsewhere" / "tiny"))


@pytest.mark.parametrize("change, line", [
    (lambda r: r["rules"][2]["spec"].update(bits=3), "recipe: rules[*].spec.bits: 4 → 3"),
    (lambda r: r["rules"][2]["spec"]["granularity"].update(size=64),
     "recipe: rules[*].spec.granularity.size: 32 → 64"),
    (lambda r: r["rules"][2]["options"].update(damp=0.02), "recipe: rules[*].options.damp: 0.01 → 0.02"),
    (lambda r: r["rules"][2].update(format="pack-quantized"),
     "recipe: rules[*].format: none → pack-quantized"),
    (lambda r: r["rules"][1].update(method="rtn"), "recipe: rules[*.v_proj].method: hqq → rtn"),
    (lambda r: r.update(name="other"), "recipe: name: mine → other"),
    (lambda r: r["calibration"].update(seed=7), "recipe: calibration.seed: 0 → 7"),
    (lambda r: r["calibration"].update(windows=5), "recipe: calibration.windows: 4 → 5"),
    (lambda r: r["calibration"].update(importance="gradient"),
     "recipe: calibration.importance: equal → gradient"),
    (lambda r: r.update(kv="int8"), "recipe: kv: none → int8"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_another_recipe_option_or_calibration(refused, change, line):
    assert line in refused(change=change)


def test_a_rule_more(refused):
    added = {"match": "*.k_proj", "method": None}
    found = refused(change=lambda r: r["rules"].insert(1, added))
    assert len(found) == 1 and found[0].startswith("recipe: rules[*.k_proj]: none → {")


def test_another_calibration_text(refused, tmp_path):
    (tmp_path / "text.txt").write_text("Something else is written here, and the runs are not the same. " * 40)
    found = refused()
    assert any(line.startswith("calibration file [text.txt].sha256: ") for line in found)
    assert any(line.startswith("calibration's tokens: ") for line in found)
    assert not any("coverage" in line for line in found)


def test_another_version_of_quantkit(refused, monkeypatch):
    now = module.__version__
    monkeypatch.setattr(module, "__version__", "9.9")
    install(monkeypatch, "quantkit", "9.9")
    assert refused() == [f"quantkit: {now} → 9.9"]
    assert f"install quantkit {now} again; or choose another --out" in refused.next


def test_another_version_of_a_plugin(refused, monkeypatch):
    install(monkeypatch, "quantkit-hqq", "0.2")
    assert refused() == ["plugin quantkit-hqq: 0.1 → 0.2"]
    assert "install quantkit-hqq 0.1 again" in refused.next


def test_a_state_that_nobody_can_read(begin, tmp_path):
    (tmp_path / "out.partial" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="belongs to another run") as caught:
        begin()
    assert "nobody can read" in caught.value.why and "rm -r" in caught.value.next
