"""Linears solved: how far off they are, and which one an error names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quantkit.formats.pack_quantized import FORMAT
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.rounding import RTN as METHOD
from quantkit.quantization.planning.plan import PlanRow
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.solve import ModelOrigin, fused, solve, solve_by_parts, solve_data_free
from quantkit.support.errors import SpecError
from quantkit.testing import tiny_model

SPEC = QuantSpec(bits=8, granularity=Granularity(strategy="channel"), scale_dtype="float32")


def row(name: str = "model.layers.0.self_attn.q_proj", method: str = "rtn", **options: object) -> PlanRow:
    return PlanRow(name=name, shape=(64, 32), layer=0, shares=name, method=method, format="pack-quantized",
                   spec=SPEC, options=options, dtype="float32", bytes_before=8192, bytes_after=2304)


def weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1.0, 1e25, 1e38, 1e-25])
def test_the_error_of_a_weight_of_any_size(size, monkeypatch):
    exact = weight() / 8 * size
    ((_, made),) = solve([row()], torch.float32, exact, None)
    ((_, usual),) = solve([row()], torch.float32, exact / size, None)
    assert made.error == pytest.approx(usual.error, rel=1e-4) and 0 < made.error < 0.01
    monkeypatch.setattr("quantkit.quantization.memory.PART", 1)
    off = solve_by_parts(torch.cat([exact, exact]), METHOD, FORMAT, None, SPEC, METHOD.options()).error
    assert off == pytest.approx(made.error, rel=1e-6)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_of_linears_solved_together_the_one_that_is_not_finite_is_named(method):
    names = [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(3)]
    weights = [weight(i) for i in range(3)]
    weights[1][4, 5], weights[1][4, 6] = float("nan"), float("inf")
    stats = [LayerStats(64, torch.eye(32))] * 3
    with pytest.raises(SpecError) as caught:
        solve([row(name, method) for name in names], torch.float32, *weights, *stats)
    assert caught.value.what == f"{names[1]}: the weight holds 2 values that are NaN or infinite"


def test_linears_of_one_input_and_one_number_of_the_tensor_go_together(tmp_path):
    """Where layers are solved by processes that open the model themselves, too."""
    groups = Granularity(strategy="group", size=16)
    spec = QuantSpec(kind="fp", bits=4, granularity=groups, scale_dtype="e4m3")
    model = tiny_model(tmp_path / "tiny", dtype="float32")
    parts_of_layer = {"self_attn.q_proj": (64, "qkv"), "self_attn.k_proj": (32, "qkv"),
                      "self_attn.v_proj": (32, "qkv"), "self_attn.o_proj": (64, "o")}
    plans = [replace(row(f"model.layers.0.{name}"), shape=(rows, 64), shares=shares, spec=spec,
                     format="nvfp4-pack-quantized") for name, (rows, shares) in parts_of_layer.items()]
    q, k, v, o = (plan.name for plan in plans)
    assert fused(plans) == [[q, k, v], [o]]
    assert fused([plans[0], replace(plans[1], spec=SPEC), plans[2]]) == [[q], [k], [v]]
    recipe = Recipe.model_validate({"name": "x"})
    solved = solve_data_free(ModelOrigin(str(model), None, recipe), tuple(plans))
    assert [made.name for _, made in solved] == [q, k, v, o]
    scales = [float(packed.tensors["weight_global_scale"]) for packed, _ in solved]
    alone = [float(solve([plan], torch.float32, load_file(model / "model.safetensors")[f"{plan.name}.weight"],
                         None)[0][0].tensors["weight_global_scale"]) for plan in plans]
    assert scales == [min(alone[:3])] * 3 + alone[3:]
