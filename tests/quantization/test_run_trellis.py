"""Trellises and rotations from recipe to generated text, on tiny models."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.architecture import parse_config
from quantkit.models.linear import Weights
from quantkit.ops.cpu_linear import fastest_window
from quantkit.quantization.calibration.runner import LayerRunner
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.quantization.run import quantize
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import RecipeError
from quantkit.testing import tiny_model
from tests.helpers.folders import contents

FEW = CalibrationSpec(windows=16, window=64)
ROTATED = """
name: rotated
description: int8 on rotated inputs.
rules:
  - {match: lm_head, optional: true}
  - match: "*"
    method: METHOD
    spec: {SPEC, rotation: hadamard}
"""
SPECS = {"int8": ("rtn", "bits: 8, granularity: {strategy: channel}"),
         "int4": ("gptq", "bits: 4, granularity: {strategy: group, size: 32}"),
         "w8a8": ("rtn", "bits: 8, granularity: {strategy: channel}, activations: token"),
         "nf4": ("nf4", "kind: nf, bits: 4, granularity: {strategy: block, size: 64}, scale_dtype: float32")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Keys and values of 64 rows, which is a trellis' least."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_key_value_heads=4)


def ids(*shape):
    return torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(0))


def far(a, b):
    """How far logits are apart, of their size."""
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SPECS)
def test_rotated_weights_do_what_the_others_do(tmp_path, tiny, name):
    """An engine that doesn't rotate would compute nonsense, so config.json says that only quantkit can."""
    method, spec = SPECS[name]
    text = ROTATED.replace("METHOD", method).replace("SPEC", spec)
    outs = {}
    for kind, written in (("rotated", text), ("plain", text.replace(", rotation: hadamard", ""))):
        (tmp_path / f"{kind}.yaml").write_text(written)
        outs[kind] = quantize(str(tiny), str(tmp_path / f"{kind}.yaml"), tmp_path / kind, calibration=FEW).out
    assert json.loads((outs["rotated"] / "config.json").read_text())["quantization_config"] == {
        "quant_method": "quantkit"}
    assert verify(outs["rotated"]).ok
    original = load(str(tiny)).model(ids(2, 40))
    found = {kind: load(str(out)) for kind, out in outs.items()}
    assert "rot" in found["rotated"].label and isinstance(found["rotated"].model, CpuModel)
    errors = {kind: far(one.model(ids(2, 40)), original) for kind, one in found.items()}
    assert errors["rotated"] < max(0.02, 1.5 * errors["plain"]), errors
    step_by_step = found["rotated"].model._model(ids(2, 40))
    assert far(found["rotated"].model(ids(2, 40)), step_by_step) < 0.04


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_trellis_is_closer_than_a_grid(tmp_path, tiny, bits):
    """Of the layers: the embedding stays as it is in both."""
    recipe = tmp_path / "trellis.yaml"
    recipe.write_text(f"extends: trellis{bits}\nrules: [{{match: model.embed_tokens}}]\n")
    result = quantize(str(tiny), str(recipe), tmp_path / "trellis", calibration=FEW)
    assert result.plan.bits_per_weight == pytest.approx(bits + 16 * 512 / 65536, abs=0.2)
    assert sum(file.stat().st_size for file in result.out.glob("*.safetensors")) >= result.plan.disk_bytes
    assert verify(result.out).ok
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"""
name: grid
rules:
  - {{match: lm_head, optional: true}}
  - match: "*"
    method: gptq
    spec: {{bits: {bits}, granularity: {{strategy: channel}}}}
""")
    gridded = quantize(str(tiny), str(grid), tmp_path / "gridded", calibration=FEW).out
    original = load(str(tiny)).model(ids(4, 64))
    found = load(str(result.out))
    assert far(found.model(ids(4, 64)), original) < 0.85 * far(load(str(gridded)).model(ids(4, 64)), original)
    text = generate(found, [[5, 6, 7]], Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert len(text[0].token_ids) == 8
    with Checkpoint.open(result.out) as checkpoint:
        row = checkpoint.manifest.layers[0]
        assert (row.format, row.spec.label()) == ("trellis", f"trellis{bits} channel w{fastest_window()} rot")


def test_a_computed_code_is_still_made_and_read(tmp_path, tiny):
    """Checkpoints say their window: those of an earlier version have one of 12."""
    (tmp_path / "r.yaml").write_text(ROTATED.replace("METHOD", "rtn").replace(
        "SPEC", "kind: trellis, bits: 4, window: 12, granularity: {strategy: channel}"))
    out = quantize(str(tiny), str(tmp_path / "r.yaml"), tmp_path / "out").out
    with Checkpoint.open(out) as checkpoint:
        assert checkpoint.manifest.layers[0].spec.label() == "trellis4 channel w12 rot"
    computed = load(str(out)).model(ids(2, 40))
    assert far(computed, load(str(tiny)).model(ids(2, 40))) < 0.3


def test_stopped_and_run_again(tmp_path, tiny, stop_at):
    """What is calibrated on are the layers as they will run: also those that an earlier run left."""
    whole = quantize(str(tiny), "trellis3", tmp_path / "whole", calibration=FEW).out

    with pytest.raises(Exception, match="stopped"):
        quantize(str(tiny), "trellis3", tmp_path / "again", calibration=FEW, progress=stop_at("layer 1"))
    again = quantize(str(tiny), "trellis3", tmp_path / "again", calibration=FEW)
    assert again.resumed >= 1
    assert contents(again.out) == contents(whole)


def test_the_next_layer_is_calibrated_on_what_the_last_one_leaves(tiny, tmp_path):
    """Rotated back: to a reader of plain weights, layers are what they were."""
    (tmp_path / "r.yaml").write_text(ROTATED.replace("METHOD", "rtn").replace("SPEC", SPECS["int8"][1]))
    out = quantize(str(tiny), str(tmp_path / "r.yaml"), tmp_path / "out").out
    source = open_source(str(tiny))
    config = parse_config(source.config())
    weights = Weights(source.tensor, source.tensors().__contains__, torch.float32)
    runners = [LayerRunner(config, weights, ids(2, 32)) for _ in range(2)]
    with Checkpoint.open(out) as checkpoint:
        names = [row.name for row in checkpoint.manifest.layers if ".layers.0." in row.name]
        runners[0].advance(0, {name: checkpoint.quantized(name) for name in names})
    runners[1].advance(0, {})
    found, original = (runner._states.get(0)[0] for runner in runners)
    assert 0 < far(found, original) < 0.03


def test_rows_that_are_no_rings_are_refused(tmp_path):
    small = tiny_model(tmp_path / "small")  # keys and values of 32 rows
    with pytest.raises(RecipeError, match="multiples of 64, not 32"):
        quantize(str(small), "trellis3", tmp_path / "out", calibration=FEW)
