"""Statistics of experts: each sees the tokens that were sent to it, however the text is cut into batches."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.manifest import reached_experts
from quantkit.checkpoint.reader import read_manifest
from quantkit.checkpoint.writer import CheckpointWriter, WorkStore
from quantkit.cli.main import main
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.quantization.calibration import runner as module
from quantkit.quantization.calibration.importance import WALKS, balanced, token_gradients
from quantkit.quantization.calibration.runner import LayerRunner
from quantkit.quantization.methods.gptq import METHOD
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_model, tiny_weights
from tests.helpers.shapes import THREE_LAYERS

HF = THREE_LAYERS | {"model_type": "qwen3_moe", "num_hidden_layers": 2, "head_dim": 8, "num_experts": 5,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
TOKENS = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
EXPERT = "model.layers.1.mlp.experts."


@pytest.fixture(params=[4096, 24, 12])
def batches(request, monkeypatch):
    """Tokens that go through a layer together."""
    monkeypatch.setattr(module, "BATCH_TOKENS", request.param)


def model(**changed):
    tensors = tiny_weights(HF) | changed
    return parse_config(HF), Weights(tensors.__getitem__, tensors.__contains__, torch.float32)


def seen_by_experts(config, weights):
    """What enters each expert's Linear in one pass of the whole model, and as which tokens."""
    whole, seen = CausalLM(config, weights), {}
    for name, one in whole.linears().items():
        if name.startswith(EXPERT):
            one.observer = lambda x, rows, name=name: seen.__setitem__(name, (x.double(), rows))
    with torch.no_grad():
        whole(TOKENS)
    return seen


def second_layer(runner):
    runner.advance(0, {})
    return runner.measure(1)


def test_each_counts_its_own_tokens(batches):
    config, weights = model()
    seen = seen_by_experts(config, weights)
    stats = second_layer(LayerRunner(config, weights, TOKENS))
    for name, (x, _) in seen.items():
        assert stats[name].tokens == len(x)
        torch.testing.assert_close(stats[name].hessian.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    ups = [stats[f"{EXPERT}{i}.up_proj"] for i in range(5)]
    assert sum(one.tokens for one in ups) == 2 * TOKENS.numel() and len({id(one) for one in ups}) == 5
    assert all(stats[f"{EXPERT}{i}.gate_proj"] is ups[i] for i in range(5))


def test_each_token_counts_what_it_matters_to_that_expert(batches, tmp_path):
    config, weights = model()
    seen = seen_by_experts(config, weights)
    with CheckpointWriter(tmp_path / "x", {}) as writer:
        found = token_gradients(config, weights, TOKENS, list(seen), 0, WorkStore(writer, WALKS))
    importance = {name: balanced(squares) for name, squares in found.items()}
    stats = second_layer(LayerRunner(config, weights, TOKENS, importance | {
        name: torch.ones(60) for name in stats_of_the_rest(config)}))
    for name, (x, rows) in seen.items():
        sharing = [other for other in seen if stats[other] is stats[name]]
        weighed = torch.stack([importance[other][rows] for other in sharing]).double().mean(0)
        assert weighed.mean() == pytest.approx(1, rel=1e-4) and weighed.std() > 0.05
        expected = (x * weighed[:, None]).T @ x / len(x)
        torch.testing.assert_close(stats[name].hessian.double(), expected, rtol=1e-4, atol=1e-5)


def stats_of_the_rest(config):
    return [f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"] + [
        f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")]


def unreached():
    """A model whose router sends nothing to its expert 3."""
    router = torch.zeros(5, 32)
    router[3] = -100 * torch.ones(32)
    return router


def test_an_expert_that_no_token_reached_is_rounded_with_a_note():
    config, weights = model()
    # hidden states are made positive in every dimension, so that the router's row can't win
    norm = torch.full((32,), 1.0)
    tensors = tiny_weights(HF) | {"model.layers.1.mlp.gate.weight": unreached(),
                                  "model.layers.1.post_attention_layernorm.weight": norm}
    weights = Weights(tensors.__getitem__, tensors.__contains__, torch.float32)
    runner = LayerRunner(config, weights, TOKENS)
    for key in range(len(runner._states)):
        runner._states.put(key, (runner._states.take(key)[0].abs() + 5,))
    stats = second_layer(runner)
    spec = QuantSpec(bits=4, granularity=Granularity(strategy="group", size=16), scale_dtype="float32")
    for part, size in (("gate_proj", 32), ("up_proj", 32), ("down_proj", 16)):
        name = f"{EXPERT}3.{part}"
        one = stats[name]
        assert one.tokens == 0 and one.hessian.shape == (size, size) and not one.hessian.any()
        codes = METHOD.run(tensors[f"{name}.weight"], one, spec, METHOD.options())
        assert codes.notes == ("rounded to nearest in place of gptq: no calibration input reached it",)


@pytest.mark.parametrize("importance", ["equal", "gradient"])
def test_a_checkpoint_says_which_experts_were_not_reached(tmp_path, importance):
    """Of 64 experts, 8 tokens that choose 1 reach some."""
    folder = tiny_model(tmp_path / "model", "qwen3_moe", num_experts=64, num_experts_per_tok=1,
                        moe_intermediate_size=32, num_hidden_layers=1)
    (tmp_path / "r.yaml").write_text(
        f"calibration: {{windows: 1, window: 8, importance: {importance}}}\n"
        "rules: [{match: '*', method: gptq, "
        "spec: {bits: 4, granularity: {strategy: group, size: 32}}}]\n")
    result = quantize(str(folder), str(tmp_path / "r.yaml"), tmp_path / "out")
    missed = [row.name for row in result.rows if any("no calibration input reached it" in note
                                                     for note in row.notes)]
    reached = {row.name.split(".")[5] for row in result.rows if ".experts." in row.name} - {
        name.split(".")[5] for name in missed}
    assert 1 <= len(reached) <= 8 and len(missed) == 3 * (64 - len(reached))
    assert torch.isfinite(load(str(result.out)).model(torch.arange(5, 25)[None])).all()


@pytest.mark.parametrize(("importance", "part"), [("gradient", "w2"), ("equal", "w1")])
def test_an_experts_weight_that_is_not_finite_is_named(tmp_path, importance, part):
    folder = tiny_model(tmp_path / "model", "mixtral")
    name = f"model.layers.1.block_sparse_moe.experts.0.{part}"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "r.yaml").write_text(
        f"calibration: {{windows: 4, window: 32, importance: {importance}}}\n"
        "rules: [{match: '*', method: gptq, "
        "spec: {bits: 4, granularity: {strategy: group, size: 32}}}]\n")
    with pytest.raises(SourceError, match=rf"'{name}\.weight' of .* not finite"):
        quantize(str(folder), str(tmp_path / "r.yaml"), tmp_path / "out")


def test_a_run_says_how_many_tokens_each_expert_got(tmp_path):
    folder = tiny_model(tmp_path / "model", "mixtral")
    (tmp_path / "r.yaml").write_text(
        "calibration: {windows: 8, window: 32, importance: equal}\n"
        "rules: [{match: '*', method: gptq, "
        "spec: {bits: 4, granularity: {strategy: group, size: 32}}}]\n")
    result = CliRunner().invoke(main, ["quantize", str(folder), "-r", str(tmp_path / "r.yaml"),
                                       "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    rows = read_manifest(tmp_path / "out").layers
    counts = sorted(row.tokens for row in rows if row.name.endswith(".w1"))
    few = sum(count < 128 for count in counts)
    assert len(counts) == 8 and sum(counts) == 2 * 2 * 256 and 0 < few < 8
    said = f"{counts[0]} to {counts[-1]} tokens each (median {counts[3]}); {few} of 8 got fewer than 128"
    assert said == reached_experts(rows)
    assert f"  - experts: {said}" in (tmp_path / "out" / "README.md").read_text()
    assert f"experts       {said}" in " ".join(result.stdout.replace("\n" + " " * 14, " ").splitlines())
    assert reached_experts([row for row in rows if "experts" not in row.name]) is None
