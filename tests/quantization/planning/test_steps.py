"""Progress within a layer: it rises, names every Linear, and follows the arithmetic of the steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.planning.steps import LayerProgress, solve_operations
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model

RECIPE = """
calibration: {windows: 4, window: 32, importance: equal}
transforms: TRANSFORMS
rules:
  - {match: lm_head, optional: true}
  - match: "*"
    method: METHOD
    spec: {bits: 4, granularity: {strategy: group, size: 32}}
"""
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def steps_of(events, index):
    return [event for event in events if event.label == f"layer {index}" and event.detail]


@pytest.mark.parametrize(("method", "transforms", "measured"), [
    ("gptq", "[]", 4), ("gptq", "[awq]", 1), ("rtn", "[]", 0)])
def test_every_step_of_a_layer_is_told(model, tmp_path, method, transforms, measured):
    path, events = tmp_path / "mine.yaml", []
    path.write_text(RECIPE.replace("METHOD", method).replace("TRANSFORMS", transforms))
    quantize(model, str(path), tmp_path / "out", progress=events.append)
    for index in range(2):
        steps = steps_of(events, index)
        assert all(step.detail.startswith(f"layer {index + 1} of 2: ") for step in steps)
        solving = [step.detail.split(": ")[1] for step in steps if "solving" in step.detail]
        assert solving == [f"solving {name}, {number} of 7 Linears done"
                           for number, name in enumerate(LINEARS)]
        assert sum("measuring" in step.detail for step in steps) == measured
        assert len({(step.done, step.total, step.phase) for step in steps}) == 1
        shares = [step.share for step in steps]
        assert shares[0] == 0 and all(a <= b for a, b in pairwise(shares)) and shares[-1] < 1
    phases = {event.phase.name for event in events if event.detail}
    assert "quantizing layers" in phases


def test_tokens_are_weighed_a_layer_and_the_head_at_a_time(model, tmp_path):
    path, events = tmp_path / "mine.yaml", []
    path.write_text(RECIPE.replace("METHOD", "gptq").replace("TRANSFORMS", "[]").replace("equal", "gradient"))
    quantize(model, str(path), tmp_path / "out", progress=events.append)
    weighing = [(event.phase.number, event.done, event.detail, event.kept) for event in events
                if event.label == "what each token matters"]
    assert weighing == [(1, 0, "layer 1 of 2", False), (1, 1, "layer 2 of 2", False),
                        (2, 0, "the head", True), (2, 0, "layer 2 of 2", False),
                        (2, 1, "layer 1 of 2", False), (2, 2, "", False)]


def test_all_steps_together_are_the_layer():
    source = open_source("synthetic:llama-8b?seed=0&layers=2")
    try:
        plan = make_plan(load_recipe("int4"), source)
    finally:
        source.close()
    rows = [row for row in plan.rows if row.layer == 0]
    shares = []
    progress = LayerProgress(plan, rows, lambda share, detail: shares.append(share))
    names = [row.name for row in rows]
    stages = [names[:3], names[3:4], names[4:6], names[6:]]
    for stage in stages:
        progress.measuring(stage)
        progress.measured(stage)
        assert len(list(progress.solving(stage, stage))) == len(stage)
        progress.walked(stage)
    progress.measuring(names)
    assert shares[-1] == pytest.approx(1)
    assert 0.2 < shares[-2] < 0.7, "down_proj, which is the widest, takes the largest part"


def test_more_passes_take_longer(model):
    source = open_source(model)
    try:
        plans = [make_plan(load_recipe("int4", effort), source) for effort in ("fast", None)]
    finally:
        source.close()
    costs = [sum(solve_operations(row, plan) for row in plan.rows) for plan in plans]
    assert 0 < costs[0] < costs[1]
