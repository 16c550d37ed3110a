"""A rotated model is the same model."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.quantization.specs import TransformSpec
from quantkit.quantization.transforms.apply import transformed
from quantkit.sources.open import open_source
from quantkit.support.errors import RecipeError
from quantkit.testing import FAMILIES, tiny_model

IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(0))
ROTATE = (TransformSpec(name="rotate"),)
SANDWICH = ("gemma2", "gemma3_text")


def logits(source):
    weights = Weights(source.tensor, source.tensors().__contains__, torch.float32)
    with torch.no_grad():
        return CausalLM(parse_config(source.config()), weights)(IDS)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("family, extra", [
    *((family, {}) for family in FAMILIES if family not in SANDWICH),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 24})])
def test_it_keeps_the_function(tmp_path, family, extra, values):
    source = open_source(str(tiny_model(tmp_path / "tiny", family, dtype="float32", **extra)))
    turned = transformed((TransformSpec(name="rotate", options={"values": values}),), source)
    before, after = logits(source), logits(turned)
    assert float((after - before).abs().max()) < 1e-4 < float(before.abs().max())
    config = parse_config(turned.config())
    assert not config.tie_word_embeddings
    infos = turned.tensors()
    assert {name: info.shape for name, info in infos.items()} == tensor_shapes(config)
    for name, info in infos.items():
        tensor = turned.tensor(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape), name


def test_no_channel_sticks_out_any_more(tmp_path):
    """As outliers do: a few channels that all layers write much larger than the others."""
    source = open_source(str(tiny_model(tmp_path / "tiny", dtype="float32", hidden_size=128)))
    name = "model.layers.0.mlp.gate_proj.weight"
    plain = source.tensor(name).clone()
    plain[:, 5] *= 50
    turned = transformed(ROTATE, _With(source, {name: plain}))

    def peak(weight):
        return float((weight.abs().amax(1) / weight.square().mean(1).sqrt()).mean())

    assert peak(plain) > 8 and peak(turned.tensor(name)) < 2.5


class _With:
    """A source with some tensors of its own."""

    def __init__(self, source, tensors):
        self._source, self._tensors = source, tensors

    def tensor(self, name):
        return self._tensors[name] if name in self._tensors else self._source.tensor(name)

    def __getattr__(self, name):
        return getattr(self._source, name)


@pytest.mark.parametrize("family", SANDWICH)
def test_where_a_norm_follows_a_layer_it_is_refused(tmp_path, family):
    source = open_source(str(tiny_model(tmp_path / "tiny", family)))
    with pytest.raises(RecipeError, match="rotate can't be used") as caught:
        transformed(ROTATE, source)
    assert "channel by channel" in (caught.value.why or "")
