"""Every family, tiny: quantized by rounding and by GPTQ, loaded, generating and measured."""

from __future__ import annotations

import pytest

from quantkit.evaluation.run import EvalSettings, evaluate
from quantkit.quantization.run import quantize
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import FAMILIES, tiny_model

RECIPE = """
{calibration}rules:
  - match: "*"
    method: {method}
    spec: {{bits: 4, granularity: {{strategy: group, size: 32}}}}
"""
WAYS = {"rtn": ("rtn", ""),
        "gptq": ("gptq", "calibration: {windows: 4, window: 64, importance: equal}\n"),
        "gptq weighed": ("gptq", "calibration: {windows: 4, window: 64}\n")}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [20], [40, 41, 42, 43]]


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(params=WAYS, scope="module")
def made(request, folder, tmp_path_factory):
    """A model and what one way makes of it."""
    method, calibration = WAYS[request.param]
    out = tmp_path_factory.mktemp("made")
    (out / "recipe.yaml").write_text(RECIPE.format(method=method, calibration=calibration))
    return folder, quantize(str(folder), str(out / "recipe.yaml"), out / "out")


@pytest.mark.sampled(6)
def test_it_is_quantized_whole_and_generates(made):
    _, result = made
    assert all(row.method for row in result.rows) and 4 < result.plan.bits_per_weight < 5
    loaded = load(str(result.out))
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    together = [one.token_ids for one in generate(loaded, PROMPTS, sampling)]
    assert all(len(tokens) == 12 for tokens in together)
    for prompt, tokens in zip(PROMPTS, together):
        assert generate(loaded, [prompt], sampling)[0].token_ids == tokens


@pytest.mark.sampled(6)
def test_it_is_measured(made):
    folder, result = made
    found = evaluate([str(folder), str(result.out)], EvalSettings(window=32, windows=4, speed=False))
    exact, four = found.to_dict()["results"]
    assert exact["kl_mean"] == 0 and 0 < four["kl_mean"] < 1.5
    assert four["bits_per_weight"] == pytest.approx(result.plan.bits_per_weight)
