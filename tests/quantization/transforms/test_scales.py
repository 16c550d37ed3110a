"""AWQ and SmoothQuant: the scales that they choose, against formulas written down again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import parse_config
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.quantization.transforms.base import LayerTensors, scale_groups
from quantkit.quantization.transforms.channel_scales import AWQ, AwqOptions, SmoothOptions
from quantkit.quantization.transforms.channel_scales import SMOOTHQUANT as SMOOTH
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model

INT4 = QuantSpec(bits=4, scale_dtype="float32", granularity=Granularity(strategy="group", size=32))
W8A8 = QuantSpec(bits=8, scale_dtype="float32", granularity=Granularity(strategy="channel"),
                 activations="token")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", dtype="float32")))


def layer_of(source, spec, outliers=(3, 40), size=30.0):
    """A layer whose inputs have a few large channels, and these inputs."""
    config, random = parse_config(source.config()), torch.Generator().manual_seed(0)
    inputs, stats = {}, {}
    for seam in scale_groups(config, 0):
        for name in seam.readers:
            x = torch.randn(200, source.tensor(f"{name}.weight").shape[1], generator=random)
            x[:, list(outliers)] *= size
            inputs[name] = x
            stats[name] = LayerStats(200, x.T @ x / 200, x.abs().amax(0))
    specs = dict.fromkeys(inputs, spec)
    return config, inputs, LayerTensors(source.tensor, source.tensors().__contains__, specs, stats)


def rounded(weight, spec):
    codes = RTN.run(weight, None, spec, RtnOptions())
    levels = codes.codes.float().reshape(*codes.scale.shape, -1) - 2 ** (spec.bits - 1)
    return (levels * codes.scale.unsqueeze(-1)).reshape(weight.shape)


def test_awq_lowers_the_error_of_what_comes_out(source):
    config, inputs, layer = layer_of(source, INT4)
    before = {name: source.tensor(f"{name}.weight") for name in inputs}
    columns, scale, after = {}, layer.scale, {}

    def watched(seam, by):
        first = f"{seam.readers[0]}.weight"
        now = layer.tensor(first)
        scale(seam, by)
        columns[seam.writer] = (layer.tensor(first) / now).mean(0)
        after.update({name: layer.tensor(f"{name}.weight") for name in seam.readers})

    layer.scale = watched
    AWQ.layer(config, 0, layer, AwqOptions())
    for seam in scale_groups(config, 0):
        errors = []
        for exact in (False, True):
            total = 0.0
            for name in seam.readers:
                weight = after[name] if exact else before[name]
                x = inputs[name]
                if exact:  # what the writer is divided by
                    x = x / columns[seam.writer]
                total += float((x @ (rounded(weight, INT4) - weight).T).square().sum())
            errors.append(total)
        assert errors[1] <= errors[0] * 1.0001, seam.writer
        if seam.rows is None:
            assert errors[1] < 0.7 * errors[0], seam.writer


def test_awq_leaves_alone_what_it_can_t_improve(source):
    """Nothing to gain where channels are alike; nothing to measure without inputs or a grid."""
    config = parse_config(source.config())
    silent = {name: LayerStats(0, torch.zeros(w, w), torch.zeros(w)) for seam in scale_groups(config, 0)
              for name in seam.readers for w in [source.tensor(f"{name}.weight").shape[1]]}
    for specs, stats in ((dict.fromkeys(silent, INT4), silent), ({}, silent),
                         (dict.fromkeys(silent, INT4), {})):
        layer = LayerTensors(source.tensor, source.tensors().__contains__, specs, stats)
        AWQ.layer(config, 0, layer, AwqOptions(steps=3))
        assert not layer.changed


@pytest.mark.parametrize("strength", [0.0, 0.5, 0.8, 1.0])
def test_smoothquant_s_scales(source, strength):
    config, _, layer = layer_of(source, W8A8)
    seam = next(scale_groups(config, 0))
    weights = [source.tensor(f"{name}.weight").numpy() for name in seam.readers]
    largest = np.max([layer.stats[name].largest.numpy() for name in seam.readers], axis=0)
    expected = largest**strength / np.max([np.abs(w).max(0) for w in weights], axis=0) ** (1 - strength)
    norm = source.tensor(f"{seam.writer}.weight").numpy()
    SMOOTH.layer(config, 0, layer, SmoothOptions(strength=strength, where="norms"))
    for name, weight in zip(seam.readers, weights, strict=True):
        assert np.allclose(layer.tensor(f"{name}.weight").numpy(), weight * expected, rtol=1e-5)
    assert np.allclose(layer.tensor(f"{seam.writer}.weight").numpy(), norm / expected, rtol=1e-5)
    assert "model.layers.0.mlp.up_proj.weight" in layer.changed  # reads a norm
    assert "model.layers.0.self_attn.o_proj.weight" not in layer.changed  # reads v


def test_smoothquant_helps_inputs_with_outliers(source):
    config, inputs, layer = layer_of(source, W8A8)
    _, _, norms = layer_of(source, W8A8)
    before = {name: source.tensor(f"{name}.weight") for name in inputs}
    SMOOTH.layer(config, 0, layer, SmoothOptions())
    SMOOTH.layer(config, 0, norms, SmoothOptions(where="norms"))

    def eight(x):
        scale = x.abs().amax(1, keepdim=True) / 127
        return (x / scale).round() * scale

    for name, x in inputs.items():
        # v and up are also divided as writers, row by row, where all is smoothed
        weight = (layer if name.endswith(("o_proj", "down_proj")) else norms).tensor(f"{name}.weight")
        smooth = x * (before[name] / weight).mean(0)
        exact = x @ before[name].T
        plain = (eight(x) @ rounded(before[name], W8A8).T - exact).square().sum()
        made = (eight(smooth) @ rounded(weight, W8A8).T - exact).square().sum()
        assert made < 0.5 * plain, name


def test_smoothquant_is_for_layers_whose_inputs_are_rounded(source):
    config, _, layer = layer_of(source, INT4)
    SMOOTH.layer(config, 0, layer, SmoothOptions())
    assert not layer.changed
