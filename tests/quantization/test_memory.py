"""What a plan predicts that a run holds in memory and on disk."""

from __future__ import annotations

import pytest

from quantkit.quantization.memory import STATES_IN_MEMORY
from quantkit.quantization.planning.plan import make_plan
from quantkit.runtime.memory.machine import RUNTIME_BYTES
from tests.helpers import shapes
from tests.helpers.shapes import (
    GROUP4,
    HIDDEN,
    INTER,
    LAYERS,
    PER_LAYER,
    VOCAB,
    Source,
    every,
    recipe,
)


def test_the_head_is_solved_in_parts_that_bound_the_peak(monkeypatch):
    monkeypatch.setattr(shapes, "VOCAB", 1 << 20)
    monkeypatch.setattr(shapes, "HIDDEN", 1024)
    text = {"windows": 1, "window": 8, "importance": "equal"}
    plan = make_plan(recipe({"match": "lm_head", "method": "gptq", "spec": GROUP4}, {"match": "*"},
                            calibration=text), Source())
    table, stored = (1 << 30) * 2, plan.rows[-1].bytes_after
    solving = table + stored + (1 << 30) + 12 * (1 << 26) + 4 * 1024**2 + 8 * ((1 << 16) + 1024) * 1024
    states = 8 * 1024 * 4
    assert plan.peak_bytes == RUNTIME_BYTES + states + max(solving, table + stored + 4 * 1024)
    assert plan.peak_bytes < 4 * (1 << 30) * 2, "float32 and two copies of it"


def test_predicted_peak_by_hand():
    free = make_plan(recipe({"match": "lm_head"}, every()), Source())
    packed = sum(r.bytes_after for r in free.rows if r.layer == 0)
    assert free.peak_bytes == RUNTIME_BYTES + max(11 * HIDDEN * INTER, 2 * VOCAB * HIDDEN) + packed
    text = {"windows": 4, "window": 16, "importance": "equal"}
    rules = [{"match": "lm_head"}, every("gptq", GROUP4)]
    solved = make_plan(recipe(*rules, calibration=text), Source())
    packed = sum(r.bytes_after for r in solved.rows if r.layer == 0)
    shared = max(4 * INTER ** 2, 2 * 4 * HIDDEN ** 2)  # the widest stage's; of the last one without drift
    states = 2 * 4 * 16 * (HIDDEN + INTER) * 4  # and the original model's
    down = 2 * 4 * INTER ** 2 + (9 + 32) * HIDDEN * INTER + packed
    before = packed - next(r.bytes_after for r in solved.rows if r.name.endswith("down_proj"))
    # gate and up, together, beside the weights of down: of their input a Hessian, the drift and two copies;
    # of each weight the original too
    both = (2 * 8 + 2 * 4) * HIDDEN ** 2 + 2 * (4 + 9 + 32) * HIDDEN * INTER + before + 4 * HIDDEN * INTER
    run = 4 * PER_LAYER + 4 * 64 * (6 * HIDDEN + 4 * INTER)
    assert solved.peak_bytes == RUNTIME_BYTES + states + max(
        down, both, run + shared)
    assert not free.calibrated and solved.needed_disk_bytes == 2 * solved.disk_bytes
    weighed = make_plan(recipe(*rules, calibration={**text, "importance": "gradient"}), Source())
    assert weighed.between_bytes == states
    assert weighed.walks_bytes == (LAYERS + 2) * 4 * 16 * HIDDEN * 4 + 4 * 4 * 16 * (7 * LAYERS + 1)
    kept = 10 * HIDDEN + 4 * INTER + 3 * 4 * 16
    backward = max(4 * PER_LAYER + 4 * kept * 64, 4 * VOCAB * HIDDEN + 24 * VOCAB * 64)
    weights = 4 * 4 * 16 * 7 * LAYERS
    assert weighed.peak_bytes == RUNTIME_BYTES + weights + max(
        states + max(down, both, run + shared), backward)


@pytest.mark.parametrize(("options", "text", "drift"), [
    ({}, {}, True),
    ({"drift": 0.25}, {}, True),
    ({"drift": 0}, {}, False),
    ({}, {"text": "random"}, False),  # of tokens that are no text it says nothing
], ids=["default", "a quarter", "none", "random"])
def test_the_original_models_states_are_kept_where_drift_is_made_up_for(options, text, drift):
    rules = [{"match": "lm_head"}, {**every("gptq", GROUP4), "options": options}]
    calibration = {"windows": 2, "window": 16, **text}
    assert bool(make_plan(recipe(*rules, calibration=calibration), Source()).drift) == drift


def test_nothing_drifts_that_is_rounded_or_is_the_head():
    head = {"match": "lm_head", "method": "gptq", "spec": GROUP4}
    plan = make_plan(recipe(head, every(), calibration={"windows": 2, "window": 16}), Source())
    assert plan.calibrated and not plan.drift


def test_hidden_states_need_disk_where_memory_has_no_room_or_another_attempt_takes_them_up():
    text = {"windows": 1 << 14, "window": 1 << 10, "importance_windows": 1 << 14}
    plan = make_plan(recipe({"match": "lm_head"}, every("gptq", GROUP4), calibration=text), Source())
    assert plan.needed_disk_bytes == plan.walks_bytes > 2 * plan.disk_bytes
    plan = make_plan(recipe({"match": "lm_head"}, every("gptq", GROUP4),
                            calibration={**text, "importance": "equal"}), Source())
    assert plan.needed_disk_bytes == 2 * plan.disk_bytes + plan.between_bytes - STATES_IN_MEMORY
