"""Scaling across a seam changes tensors and statistics, and never the function."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.architecture import linear_slots, parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.transforms.base import LayerTensors, ScaleGroup, scale_groups
from quantkit.sources.open import open_source
from quantkit.testing import FAMILIES, tiny_model

IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def logits(source, changed=None):
    weights = Weights(source.tensor, source.tensors().__contains__, torch.float32)
    with torch.no_grad():
        return CausalLM(parse_config(source.config()), weights.with_changed(changed or {}))(IDS)


def tensors_of(source, stats=None):
    config = parse_config(source.config())
    return LayerTensors(source.tensor, source.tensors().__contains__, {}, stats or {}, config.offset_norms)


def channels(config, seam: ScaleGroup) -> int:
    return seam.rows[1] - seam.rows[0] if seam.rows else config.hidden_size


@pytest.mark.parametrize("family, extra", [
    *((family, {}) for family in FAMILIES), ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3_moe", {"mlp_only_layers": [0]})])
def test_every_seam_of_every_family_keeps_the_function(tmp_path, family, extra):
    source = open_source(str(tiny_model(tmp_path / "tiny", family, dtype="float32", **extra)))
    config, random = parse_config(source.config()), torch.Generator().manual_seed(1)
    before, changed = logits(source), {}
    for index in range(config.num_layers):
        layer = tensors_of(source)
        found = list(scale_groups(config, index))
        for seam in found:
            layer.scale(seam, torch.rand(channels(config, seam), generator=random) * 4 + 0.25)
        read = {name for seam in found for name in seam.readers}
        linears = {slot.name for slot in linear_slots(config) if slot.layer == index}
        if family == "gpt_oss":  # its activation adds 1 to what up writes
            linears = {name for name in linears if not name.endswith("down_proj")}
        assert read == linears
        changed |= layer.changed
    assert float((logits(source, changed) - before).abs().max()) < 3e-5
    moved = [name for name, now in changed.items() if not torch.equal(now, source.tensor(name))]
    assert set(moved) == set(changed)


def test_a_norm_of_few_bits_loses_nothing_by_it(tmp_path):
    """bfloat16 rounds what is left of the norm; the readers take the exact rest. A weight of 0 stays."""
    source = open_source(str(tiny_model(tmp_path / "tiny", dtype="bfloat16")))
    config = parse_config(source.config())
    layer, seam = tensors_of(source), next(scale_groups(config, 0))
    name = f"{seam.writer}.weight"
    layer.changed[name] = source.tensor(name).clone()
    layer.changed[name][3] = 0
    before = {r: layer.tensor(f"{r}.weight") * layer.tensor(name) for r in seam.readers}
    layer.scale(seam, torch.rand(config.hidden_size) * 3 + 0.1)
    assert layer.changed[name].dtype == torch.bfloat16 and layer.changed[name][3] == 0
    for reader in seam.readers:
        now = layer.tensor(f"{reader}.weight") * layer.tensor(name)
        assert torch.allclose(now, before[reader], rtol=1e-6, atol=0)
        assert layer.stored(f"{reader}.weight").dtype == torch.bfloat16
        dtype, exact = layer.weights([f"{reader}.weight"])
        assert exact.dtype == torch.float32 and dtype == torch.bfloat16


def test_statistics_are_those_of_the_new_inputs(tmp_path):
    source = open_source(str(tiny_model(tmp_path / "tiny", dtype="float32")))
    config = parse_config(source.config())
    seam = list(scale_groups(config, 0))[1]  # v → o, where one channel is read by the heads of a group
    x = torch.randn(100, config.num_heads * config.head_dim, dtype=torch.float64)
    name, by = seam.readers[0], torch.rand(channels(config, seam)) + 0.5
    layer = tensors_of(source, {name: LayerStats(100, (x.T @ x / 100).float(), x.abs().amax(0).float())})
    layer.scale(seam, by)
    scaled = x / seam.spread(by).double()
    found = layer.stats[name]
    assert found.hessian is not None and found.largest is not None and found.tokens == 100
    assert torch.allclose(found.hessian.double(), scaled.T @ scaled / 100, rtol=1e-4, atol=1e-6)
    assert torch.allclose(found.largest.double(), scaled.abs().amax(0), rtol=1e-5)
