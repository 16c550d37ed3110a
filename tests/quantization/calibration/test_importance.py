"""What a token counts for, a layer at a time, against autograd through the whole model."""

from __future__ import annotations

import os
import weakref

import pytest
import torch
import torch.nn.functional as F

from quantkit.checkpoint.writer import CheckpointWriter, WorkStore
from quantkit.models.architecture import linear_slots, parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.ops.stored_weight import PlainWeight
from quantkit.quantization.calibration import importance as module
from quantkit.quantization.calibration.importance import (
    MOST,
    NEVER,
    WALKS,
    balanced,
    spread,
    token_gradients,
    weighed_windows,
)
from quantkit.quantization.calibration.runner import LayerRunner
from quantkit.support.errors import CalibrationError
from quantkit.testing import tiny_weights
from tests.helpers.shapes import THREE_LAYERS

TOKENS = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
KINDS = {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False},
         "biases": {"model_type": "qwen2", "tie_word_embeddings": True},
         "norms of q and k": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
         "a window": {"model_type": "mistral", "sliding_window": 4, "tie_word_embeddings": False}}

OTHERS = {"experts": {"model_type": "mixtral", "num_local_experts": 3, "tie_word_embeddings": False},
          "fused": {"model_type": "phi3", "tie_word_embeddings": True},
          "capped": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4,
                     "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
                     "hidden_act": "gelu_pytorch_tanh"}}
"""Whose gradients are found as those of all, and then used alike."""


@pytest.fixture(params=list(KINDS))
def model(request):
    hf = THREE_LAYERS | (KINDS | OTHERS)[request.param]
    tensors = tiny_weights(hf)
    return parse_config(hf), Weights(tensors.__getitem__, tensors.__contains__, torch.float32), tensors


def token_importance(config, weights, wanted, seed, folder, *step):
    with CheckpointWriter(folder, {}) as writer:
        try:
            found = token_gradients(config, weights, TOKENS, wanted, seed, WorkStore(writer, WALKS), *step)
        finally:
            writer.abandon()
    return {name: balanced(squares) for name, squares in found.items()}


def all_of(config):
    return [slot.name for slot in linear_slots(config) if slot.layer is not None]


def importance(model, folder, seed=0, wanted=None):
    config, weights, _ = model
    return token_importance(config, weights, wanted or all_of(config), seed, folder)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def drawn(monkeypatch):
    """The answers that were drawn, in order."""
    seen, draw = [], module.draw_answers

    def spy(chances, random):
        seen.append(draw(chances, random))
        return seen[-1]

    monkeypatch.setattr(module, "draw_answers", spy)
    return seen


def by_autograd(config, weights, answers):
    """Squared gradients of every Linear's outputs, averaged over them."""
    whole, outputs = CausalLM(config, weights), {}
    for name, linear in whole.linears().items():
        if name != "lm_head":
            linear.on_output = lambda y, rows=None, name=name: (
                y.retain_grad(), outputs.__setitem__(name, (y, rows)))
    whole.embedding = PlainWeight(whole.embedding.tensor.clone().requires_grad_(True))
    logits = whole(TOKENS)
    F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum").backward()
    return {name: (y.grad.square().mean(-1).flatten(), rows) for name, (y, rows) in outputs.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [*KINDS, *OTHERS], indirect=True)
@pytest.mark.parametrize("together, logits", [(2048, 1 << 25), (24, 1 << 25), (2048, 250), (1, 1)])
def test_it_is_the_square_of_the_gradient_of_answers_that_the_model_gives(
        model, drawn, tmp_path, monkeypatch, together, logits):
    monkeypatch.setattr(module, "BACKWARD_TOKENS", together)
    monkeypatch.setattr(module, "BACKWARD_LOGITS", logits)
    config, weights, _ = model
    steps = []
    found = token_importance(config, weights, all_of(config), 7, tmp_path / "x", lambda: steps.append(1))
    expected = by_autograd(config, weights, torch.cat(drawn))
    assert found.keys() == expected.keys() and len(steps) == 7
    for name, (squares, rows) in expected.items():
        limited = (squares / squares.mean()).clamp(max=MOST)
        weights = torch.ones(TOKENS.numel())
        weights[slice(None) if rows is None else rows] = limited / limited.mean()
        torch.testing.assert_close(found[name], weights, rtol=2e-3, atol=1e-5)


@pytest.mark.sampled(2)
def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(model, tmp_path):
    once, again, other = (importance(model, tmp_path / "x", seed) for seed in (1, 1, 2))
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not torch.equal(once["model.layers.0.mlp.down_proj"], other["model.layers.0.mlp.down_proj"])


@pytest.mark.sampled(5)
def test_answers_are_drawn_as_often_as_the_model_gives_them(model, drawn, tmp_path):
    config, weights, _ = model
    for seed in range(60):
        importance(model, tmp_path / "x", seed)
    counts = torch.zeros(TOKENS.numel(), 50)
    for answers in torch.cat(drawn).view(60, -1):
        counts[torch.arange(len(answers)), answers] += 1
    chances = CausalLM(config, weights)(TOKENS).softmax(-1).flatten(0, 1)
    # a sum of 3,600 draws per probability bin: what was drawn is as likely as it should be
    expected = float((chances * chances).sum(1).mean())
    seen = float((counts / 60 * chances).sum(1).mean())
    spread = float(((chances ** 3).sum(1) - (chances ** 2).sum(1) ** 2).mean().sqrt()) / (60 * 60) ** 0.5
    assert abs(seen - expected) < 5 * spread


@pytest.mark.sampled(2)
def test_the_largest_are_cut(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST", 1e9)
    whole = importance(model, tmp_path / "x")
    monkeypatch.setattr(module, "MOST", 1.5)
    for name, one in importance(model, tmp_path / "x").items():
        assert one.mean() == pytest.approx(1, rel=1e-5)
        over = whole[name] > 1.5
        assert over.any() and one[over].max() == one[over].min() == one.max()
        torch.testing.assert_close(one[~over] / one[over][0], whole[name][~over] / 1.5)


def test_hessians_weigh_the_tokens(model, tmp_path):
    config, weights, tensors = model
    found = importance(model, tmp_path / "x")
    stats = LayerRunner(config, weights, TOKENS, found).measure(0)
    assert len({id(shared) for shared in stats.values()}) == 4, "Linears with the same input share one"
    sharing = {name: [other for other in stats if stats[other] is stats[name]] for name in stats}
    inputs = {}
    layer = CausalLM(config, weights).layers[0]
    for name, linear in layer.linears().items():
        linear.observer = lambda x, name=name: inputs.__setitem__(name, x.flatten(0, 1).double())
    layer(F.embedding(TOKENS, tensors["model.embed_tokens.weight"]), torch.arange(12).expand(5, 12))
    for name, x in inputs.items():
        weight = torch.stack([found[other] for other in sharing[name]]).double().mean(0)
        expected = (x * weight[:, None]).T @ x / TOKENS.numel()
        torch.testing.assert_close(stats[name].hessian.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_model_without_a_slope_says_so(model, tmp_path):
    model[2]["model.norm.weight"].zero_()
    with pytest.raises(CalibrationError, match="depend on none of its layers") as caught:
        importance(model, tmp_path / "x")
    assert caught.value.next == "calibration: {importance: equal}"


def test_where_no_answer_depends_on_a_linear_all_tokens_count_the_same_and_that_is_noted(model, tmp_path):
    config, weights, tensors = model
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    found = importance(model, tmp_path / "x")
    dead = {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")}
    assert {name for name, one in found.items() if bool((one == 1).all())} == dead
    runner = LayerRunner(config, weights, TOKENS, found)
    runner.advance(0, {})
    stats = runner.measure(1)
    assert {name for name, one in stats.items() if one.notes} == dead


def test_only_what_is_wanted_is_kept(model, tmp_path):
    wanted = ["model.layers.0.self_attn.v_proj", "model.layers.2.mlp.down_proj"]
    found, whole = importance(model, tmp_path / "x", wanted=wanted), importance(model, tmp_path / "x")
    assert sorted(found) == wanted and all(torch.equal(found[name], whole[name]) for name in wanted)


def test_one_layer_is_in_memory_at_a_time(model, tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Watched(module.DecoderLayer):
        def __init__(self, *args):
            most.append(len(alive))
            super().__init__(*args)
            alive.add(self)

    head = module._head
    monkeypatch.setattr(module, "DecoderLayer", Watched)
    monkeypatch.setattr(module, "_head", lambda *args: (most.append(len(alive)), head(*args))[1])
    importance(model, tmp_path / "x")
    assert most == [0] * 7


def test_inference_mode_outside_is_no_matter(model, tmp_path):
    with torch.inference_mode():
        inside = importance(model, tmp_path / "x", 2**70)
    assert inside.keys() == importance(model, tmp_path / "x").keys()


def test_an_output_that_is_not_finite(model, tmp_path):
    model[2]["model.norm.weight"][3] = float("nan")
    with pytest.raises(CalibrationError, match=r"output is NaN or infinite in .* window 0"):
        importance(model, tmp_path / "x")


def test_a_hidden_state_that_is_not_finite_names_sample_and_layer(model, tmp_path):
    model[2]["model.layers.1.mlp.down_proj.weight"][:] = 3e38
    with pytest.raises(CalibrationError, match=r"output of model\.layers\.1\.mlp\.down_proj .* window 0"):
        importance(model, tmp_path / "x")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", ["tied", "untied", "capped", "experts"], indirect=True)
@pytest.mark.parametrize("logits", [1 << 25, 250])
def test_the_heads_is_the_mean_over_all_answers_of_the_squared_gradient(model, tmp_path, monkeypatch, logits):
    """By autograd: an answer at a time, each as often as the model gives it."""
    monkeypatch.setattr(module, "BACKWARD_LOGITS", logits)
    config, weights, _ = model
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    whole, before = CausalLM(config, weights), []
    whole.head.on_output = lambda y: (y.requires_grad_(True), before.append(y))
    after = whole(TOKENS).flatten(0, 1)
    chances, squares = after.detach().softmax(-1), torch.zeros(TOKENS.numel())
    for answer in range(50):
        loss = F.cross_entropy(after, torch.full((TOKENS.numel(),), answer), reduction="sum")
        (slope,) = torch.autograd.grad(loss, before[0], retain_graph=True)
        squares += chances[:, answer] * slope.flatten(0, 1).square().sum(-1)
    limited = (squares / squares.mean()).clamp(max=MOST)
    found = importance(model, tmp_path / "x", wanted=[head])
    assert list(found) == [head]
    torch.testing.assert_close(found[head], limited / limited.mean(), rtol=2e-3, atol=1e-5)
    # the layers' own are not changed by asking for it
    alone, beside = importance(model, tmp_path / "x"), importance(model, tmp_path / "x",
                                                                  wanted=[*all_of(config), head])
    assert all(torch.equal(beside[name], one) for name, one in alone.items())
    assert torch.equal(beside[head], found[head])


def test_for_the_head_alone_nothing_goes_backward(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module._Walks, "backward", lambda *a: pytest.fail("a layer went backward"))
    head = "model.embed_tokens" if model[0].tie_word_embeddings else "lm_head"
    assert importance(model, tmp_path / "x", wanted=[head])[head].mean() == pytest.approx(1, rel=1e-4)


def test_windows_that_are_weighed_are_spread_evenly():
    assert weighed_windows(32, 4) == [4, 12, 20, 28]
    assert weighed_windows(3, 2) == [0, 2]
    assert weighed_windows(3, 4) == weighed_windows(3, 3) == [0, 1, 2]
    assert weighed_windows(1, 1) == [0]


def test_other_windows_count_as_the_weighed_ones_do_at_the_same_place():
    squares = torch.rand(2, 11, generator=torch.Generator().manual_seed(0))
    known = balanced(squares.flatten()).view(2, 11)
    weights = spread(squares.flatten(), [1, 3], 5).view(5, 11)
    assert abs(float(weights.mean()) - 1) < 1e-6
    unit = float(weights[1, 0] / known[0, 0])
    torch.testing.assert_close(weights[[1, 3]], known * unit)
    for start, stop in ((0, 1), (1, 2), (2, 4), (4, 8), (8, 11)):
        mean = float(known[:, start:stop].mean()) * unit
        torch.testing.assert_close(weights[[0, 2, 4], start:stop], torch.full((3, stop - start), mean))
    everything = torch.rand(55)
    assert torch.equal(spread(everything, range(5), 5), balanced(everything))


def test_tokens_that_did_not_reach_an_expert_count_as_those_that_did_at_their_place():
    squares = torch.full((2, 8), NEVER)
    squares[0, 5], squares[1, 6], squares[0, 0] = 1.0, 3.0, 8.0
    weights = spread(squares.flatten(), [0, 1], 3).view(3, 8)
    assert abs(float(weights.mean()) - 1) < 1e-6
    unit = float(weights[2, 1])  # nothing reached it there
    torch.testing.assert_close(weights[2] / unit, torch.tensor([2.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]))
    torch.testing.assert_close(weights[1] / unit, torch.tensor([2.0, 1, 1, 1, 0.5, 0.5, 0.75, 0.5]))
    assert torch.equal(spread(torch.full((16,), NEVER), [0, 1], 3), torch.ones(24))
