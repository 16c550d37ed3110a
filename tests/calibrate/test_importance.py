"""What a token counts for, a layer at a time, against autograd through the whole model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quantkit.calibrate import importance as module
from quantkit.calibrate import spill
from quantkit.calibrate.importance import MOST, token_importance
from quantkit.calibrate.runner import LayerRunner
from quantkit.errors import CalibrationError
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.testing import tiny_weights

HF = {"model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
      "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
      "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32"}
TOKENS = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    hf = {**HF, "tie_word_embeddings": request.param}
    tensors = tiny_weights(hf)
    return parse_config(hf), Weights(tensors.__getitem__, tensors.__contains__, torch.float32), tensors


@pytest.fixture
def drawn(monkeypatch):
    """The answers that were drawn, in order."""
    seen, draw = [], torch.multinomial

    def spy(chances, count, **options):
        seen.append(draw(chances, count, **options))
        return seen[-1]

    monkeypatch.setattr(torch, "multinomial", spy)
    return seen


def by_autograd(config, weights, answers):
    """Squared gradients of every Linear's outputs, averaged over them."""
    whole, outputs = CausalLM(config, weights), {}
    for name, linear in whole.linears().items():
        if name != "lm_head":
            linear.on_output = lambda y, name=name: (y.retain_grad(), outputs.__setitem__(name, y))
    whole.embedding = whole.embedding.clone().requires_grad_(True)
    logits = whole(TOKENS)
    F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum").backward()
    return {name: y.grad.square().mean(-1).flatten() for name, y in outputs.items()}


@pytest.mark.parametrize("together, logits, memory", [(2048, 1 << 25, 1 << 30), (24, 1 << 25, 1 << 30),
                                                      (2048, 250, 0), (1, 1, 5000)])
def test_it_is_the_square_of_the_gradient_of_answers_that_the_model_gives(
        model, drawn, tmp_path, monkeypatch, together, logits, memory):
    monkeypatch.setattr(module, "BACKWARD_TOKENS", together)
    monkeypatch.setattr(module, "BACKWARD_LOGITS", logits)
    monkeypatch.setattr(module, "Spill", lambda folder: spill.Spill(folder, memory))
    config, weights, _ = model
    steps = []
    found = token_importance(config, weights, TOKENS, 7, tmp_path / "states", lambda: steps.append(1))
    expected = by_autograd(config, weights, torch.cat(drawn))
    assert found.keys() == expected.keys() and len(found) == 21 and len(steps) == 6
    for name, squares in expected.items():
        limited = (squares / squares.mean()).clamp(max=MOST)
        torch.testing.assert_close(found[name], limited / limited.mean(), rtol=2e-3, atol=1e-5)
    assert not (tmp_path / "states").exists()


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(model, tmp_path):
    config, weights, _ = model
    once, again, other = (token_importance(config, weights, TOKENS, seed, tmp_path / "x")
                          for seed in (1, 1, 2))
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not torch.equal(once["model.layers.0.mlp.down_proj"], other["model.layers.0.mlp.down_proj"])


def test_answers_are_drawn_as_often_as_the_model_gives_them(model, drawn, tmp_path):
    config, weights, _ = model
    for seed in range(60):
        token_importance(config, weights, TOKENS, seed, tmp_path / "x")
    counts = torch.zeros(TOKENS.numel(), 50)
    for answers in torch.cat(drawn).view(60, -1):
        counts[torch.arange(len(answers)), answers] += 1
    chances = CausalLM(config, weights)(TOKENS).softmax(-1).flatten(0, 1)
    # a sum of 3,600 draws per probability bin: what was drawn is as likely as it should be
    expected = float((chances * chances).sum(1).mean())
    seen = float((counts / 60 * chances).sum(1).mean())
    spread = float(((chances ** 3).sum(1) - (chances ** 2).sum(1) ** 2).mean().sqrt()) / (60 * 60) ** 0.5
    assert abs(seen - expected) < 5 * spread


def test_no_token_counts_for_more_than_the_limit(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST", 1.5)
    config, weights, _ = model
    for one in token_importance(config, weights, TOKENS, 0, tmp_path / "x").values():
        assert one.mean() == pytest.approx(1, rel=1e-5) and one.min() >= 0
        assert float(one.max() / one[one > 0].median()) < 1.5 / 0.2


def test_hessians_weigh_the_tokens(model, tmp_path):
    config, weights, tensors = model
    found = token_importance(config, weights, TOKENS, 0, tmp_path / "x")
    stats = LayerRunner(config, weights, TOKENS, found).measure(0)
    assert len({id(one) for one in stats.values()}) == 7, "each Linear has its own"
    inputs = {}
    layer = CausalLM(config, weights).layers[0]
    for name, linear in layer.linears().items():
        linear.observer = lambda x, name=name: inputs.__setitem__(name, x.flatten(0, 1).double())
    layer(F.embedding(TOKENS, tensors["model.embed_tokens.weight"]), torch.arange(12).expand(5, 12))
    for name, x in inputs.items():
        expected = (x * found[name].double()[:, None]).T @ x / TOKENS.numel()
        torch.testing.assert_close(stats[name].hessian.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_model_without_a_slope_says_so(model, tmp_path):
    config, weights, tensors = model
    tensors["model.norm.weight"].zero_()
    with pytest.raises(CalibrationError, match=r"gradient at model\.layers\.2\.\w+\.\w+ is zero") as caught:
        token_importance(config, weights, TOKENS, 0, tmp_path / "x")
    assert caught.value.next == "calibration: {importance: equal}" and not (tmp_path / "x").exists()


def test_an_output_that_is_not_finite(model, tmp_path):
    config, weights, tensors = model
    tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(CalibrationError, match="output on the calibration text is NaN"):
        token_importance(config, weights, TOKENS, 0, tmp_path / "x")
