"""Stages of a layer, one after another, equal the layer; how far inputs have drifted equals NumPy's."""

import numpy as np
import pytest
import torch

from quantkit.models.architecture import linear_slots, parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.quantization.calibration.runner import LayerRunner
from quantkit.testing import tiny_weights
from tests.helpers.shapes import THREE_LAYERS

LLAMA = THREE_LAYERS | {"num_hidden_layers": 2}
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 8, "hidden_act": "gelu_pytorch_tanh",
                  "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8,
                  "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": 0}
EXPERTS = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                   "tie_word_embeddings": False}
TOKENS = torch.randint(1, 50, (5, 12), generator=torch.Generator().manual_seed(0))


class Model:
    def __init__(self, hf):
        self.tensors, self.config = tiny_weights(hf), parse_config(hf)

    def runner(self, **options):
        return LayerRunner(self.config, self.weights(), TOKENS, **options)

    def weights(self):
        return Weights(self.tensors.__getitem__, self.tensors.__contains__, torch.float32)

    def rounded(self, index):
        """Weights of a layer, roughly rounded, by their Linears' names."""
        return {slot.name: (self.tensors[f"{slot.name}.weight"] * 20).round() / 20
                for slot in linear_slots(self.config) if slot.layer == index}

    def inputs(self, replaced):
        """What enters every Linear, float64 ``[tokens, in]``, by name, with some weights replaced."""
        whole, entered = CausalLM(self.config, Weights(lambda name: replaced.get(
            name.removesuffix(".weight"), self.tensors[name]), self.tensors.__contains__, torch.float32)), {}
        for name, linear in whole.linears().items():
            def watch(x, tokens=None, name=name):
                entered[name] = x.flatten(0, -2).double().numpy()

            linear.observer = watch
        with torch.no_grad():
            whole(TOKENS)
        return entered


def walked(runner, replaced, wanted=None):
    """Every statistic of a layer, measured stage by stage."""
    stats = {}
    for stage in runner.stages(runner.next):
        names = set(stage.linears)
        needs = None if wanted is None else dict.fromkeys(names, wanted)
        stats |= runner.measure_stage(stage, needs)
        runner.advance_stage(stage, {name: replaced[name] for name in names if name in replaced})
    return stats


@pytest.mark.parametrize("hf", [LLAMA, GEMMA2, PHI3, EXPERTS], ids=lambda hf: hf["model_type"])
def test_a_layer_in_stages_is_the_layer(hf):
    model = Model(hf)
    staged, whole = model.runner(), model.runner()
    for index in range(2):
        replaced = model.rounded(index)
        walked(staged, replaced)
        whole.advance(index, replaced)
        assert staged.next == whole.next == index + 1
        for batch in range(len(whole._states)):
            (mine,), (theirs,) = staged._states.get(batch), whole._states.get(batch)
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("hf", [LLAMA, GEMMA2, PHI3], ids=lambda hf: hf["model_type"])
def test_a_stage_is_measured_behind_the_rounded_stages_before_it(hf):
    model = Model(hf)
    replaced = model.rounded(0) | model.rounded(1)
    runner, entered = model.runner(), model.inputs(replaced)
    stats = walked(runner, replaced) | walked(runner, replaced)
    assert set(stats) == {slot.name for slot in linear_slots(model.config)}
    for name, found in stats.items():
        rows = entered[name]
        np.testing.assert_allclose(found.hessian.numpy(), rows.T @ rows / len(rows), rtol=1e-3, atol=1e-5)
        assert found.drift is None, "nobody asked for it"


@pytest.mark.parametrize("weighed", [False, True])
def test_drift_is_how_far_inputs_are_from_the_original_models(weighed):
    model = Model(LLAMA)
    replaced = model.rounded(0) | model.rounded(1)
    importance = torch.rand(TOKENS.numel(), generator=torch.Generator().manual_seed(1))
    names = [slot.name for slot in linear_slots(model.config)]
    runner = model.runner(drift=True, importance=dict.fromkeys(names, importance) if weighed else None)
    asked = {"hessian", "drift"}
    stats = walked(runner, replaced, asked) | walked(runner, replaced, asked)
    original, now = model.inputs({}), model.inputs(replaced)
    counts = importance.double().numpy()[:, None] if weighed else 1.0
    for name in names:
        if name.endswith("down_proj"):
            assert stats[name].drift is None
            continue
        expected = ((original[name] - now[name]) * counts).T @ now[name] / TOKENS.numel()
        np.testing.assert_allclose(stats[name].drift.numpy(), expected, rtol=1e-3, atol=2e-5)
    first, last = stats["model.layers.0.self_attn.q_proj"], stats["model.layers.1.mlp.up_proj"]
    assert not first.drift.any(), "nothing was rounded before it"
    assert float(last.drift.abs().max()) > 1e-3


def test_of_experts_there_is_no_drift_but_of_attention_behind_them():
    model = Model(EXPERTS)
    replaced = model.rounded(0)
    runner = model.runner(drift=True)
    asked = {"hessian", "drift"}
    stats = walked(runner, replaced, asked) | walked(runner, {}, asked)
    experts = [found for name, found in stats.items() if ".experts." in name]
    assert experts and all(found.drift is None for found in experts)
    assert float(stats["model.layers.1.self_attn.q_proj"].drift.abs().max()) > 1e-4
