"""Losses and gradients of a quantized model, against autograd through all of a tiny model in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quantkit.formats.base import Codes
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import linear_slots, parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.spill import Spill
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model
from quantkit_recover.walk import (
    SCALE,
    Heads,
    QuantizedWalk,
    ScaledWeight,
    original_states,
    scale_of,
    with_scale,
)

INT2 = QuantSpec(bits=2, symmetric=False, granularity=Granularity(strategy="group", size=16),
                 scale_dtype="float32")
CHANNEL = QuantSpec(bits=3, granularity=Granularity(strategy="channel"), scale_dtype="float32")
ROTATED = CHANNEL.model_copy(update={"rotation": "hadamard"})
TOKENS = torch.randint(4, 300, (3, 12), generator=torch.Generator().manual_seed(0))


class WalkedModel:
    """A tiny model and its quantized form: what a walk needs."""

    def __init__(self, folder, family, spec):
        self.source = open_source(str(tiny_model(folder / "tiny", family, dtype="float32")))
        self.config = parse_config(self.source.config())
        self.tensors = {name: self.source.tensor(name).float() for name in self.source.tensors()}
        self.weights = Weights(self.tensors.__getitem__, self.tensors.__contains__, torch.float32)
        form, method = registry("formats").get("pack-quantized"), registry("methods").get("rtn")
        self.packed, self.starts = {}, {}
        for slot in linear_slots(self.config):
            if slot.layer is None:
                continue
            weight = self.tensors[f"{slot.name}.weight"]
            codes: Codes = method.run(apply_hadamard(weight) if spec.rotation else weight, None, spec,
                                      method.options())
            self.packed[slot.name] = form.pack(codes, torch.float32)
            self.starts[slot.name + SCALE] = scale_of(self.packed[slot.name])
        self.starts |= {name: tensor for name, tensor in self.tensors.items() if tensor.dim() == 1}
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        self.heads = Heads(self.tensors[name], self.tensors[name], self.config.logit_softcap)
        self.targets = torch.cat(list(original_states(self.config, self.weights, TOKENS, Spill(None),
                                                      lambda index: None)))

    def walk(self):
        def stored(index):
            return {name: packed for name, packed in self.packed.items() if f"layers.{index}." in name}

        return QuantizedWalk(self.config, self.weights, stored, self.starts, None, self.heads, Spill(None))

    def expected(self, values):
        """The loss and gradients by autograd through the whole model in float64."""
        leaves = {name: value.double().requires_grad_(True) for name, value in values.items()}
        tensors = {name: tensor.double() for name, tensor in self.tensors.items()}
        original = CausalLM(self.config, Weights(tensors.__getitem__, tensors.__contains__, torch.float64))
        changed = dict(tensors)
        for name, packed in self.packed.items():
            stored = registry("formats").get("pack-quantized").dequantize(packed).double()
            start = self.starts[name + SCALE].double()
            ratio = (leaves[name + SCALE] / start)[..., None]
            scaled = (stored.view(*start.shape, -1) * ratio).view_as(stored)
            if packed.spec.rotation:  # undone by a matrix, in float64 too
                scaled = scaled @ undo_hadamard(torch.eye(stored.shape[1])).double()
            changed[f"{name}.weight"] = scaled
        changed |= {name: leaf for name, leaf in leaves.items() if not name.endswith(SCALE)}
        quantized = CausalLM(self.config, Weights(changed.__getitem__, changed.__contains__, torch.float64))
        with torch.no_grad():
            target_log_probs = F.log_softmax(original(TOKENS), dim=-1)
        log_probs = F.log_softmax(quantized(TOKENS), dim=-1)
        loss = F.kl_div(log_probs, target_log_probs, log_target=True, reduction="sum") / TOKENS.numel()
        loss.backward()
        return float(loss.detach()), {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize(("family", "spec"), [("llama", INT2), ("qwen2", CHANNEL), ("gemma2", INT2),
                                              ("qwen3", CHANNEL), ("phi3", INT2), ("llama", ROTATED)])
def test_loss_and_gradient_are_those_of_the_whole_model(tmp_path, family, spec):
    model = WalkedModel(tmp_path, family, spec)
    random = torch.Generator().manual_seed(1)
    values = {name: start * (1 + 0.1 * torch.randn(start.shape, generator=random))
              for name, start in model.starts.items()}
    loss, gradients = model.walk().gradient(values, TOKENS, model.targets)
    expected, wanted = model.expected(values)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert model.walk().loss(values, TOKENS, model.targets) == pytest.approx(expected, rel=1e-4)
    assert gradients.keys() == wanted.keys() == values.keys()
    size = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-3 * float(gradient.norm()) + 1e-5 * size, name


def test_the_original_is_at_no_distance_from_itself(tmp_path):
    model = WalkedModel(tmp_path, "llama", INT2)
    walk = QuantizedWalk(model.config, model.weights, lambda index: {}, {}, None, model.heads, Spill(None))
    norms = {name: start for name, start in model.starts.items() if not name.endswith(SCALE)}
    assert abs(walk.loss(norms, TOKENS, model.targets)) < 1e-5


def test_other_scales_leave_codes_as_they_are(tmp_path):
    model = WalkedModel(tmp_path, "llama", INT2)
    name, packed = next(iter(model.packed.items()))
    form, scale = registry("formats").get("pack-quantized"), model.starts[name + SCALE] * 1.25
    changed = with_scale(packed, scale)
    assert torch.equal(form.unpack(changed).codes, form.unpack(packed).codes)
    expected = ScaledWeight(packed, scale_of(packed), torch.device("cpu")).weight(scale)
    torch.testing.assert_close(form.dequantize(changed), expected)
