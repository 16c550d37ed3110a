"""The operators of a tiny model: which there are, what they move, and that measuring changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from quantkit.evaluation.bench.kernels import SPECS, packed_weight
from quantkit.evaluation.roofline import ceilings, measure
from quantkit.evaluation.roofline.ceilings import arithmetic_of
from quantkit.evaluation.roofline.cost import OperatorCost
from quantkit.evaluation.roofline.measure import measure_roofline
from quantkit.evaluation.roofline.result import MachineCeilings, Roofline
from quantkit.kv.spec import parse_kv
from quantkit.ops import cpu_linear, cpu_machine
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model

LINEARS = ["q+k+v", "o", "gate+up", "down"]
RECIPE = """\
name: narrow
rules:
  - match: lm_head
    optional: true
  - match: {match}
    method: rtn
    spec: {{bits: 8, granularity: {{strategy: {strategy}}}}}
  - match: "*"
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(measure, "TOKENS", 2)


@pytest.fixture(scope="module")
def roofline(loaded):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "REPEATS", 2)
        return measure_roofline(loaded, rows=(1, 2, 20), contexts=(5, 70, 9999))


def test_every_operator_at_every_number_of_rows(roofline, loaded):
    assert [(speed.operator, speed.rows) for speed in roofline.operators if not speed.context] == [
        *((name, rows) for rows in (1, 2) for name in [*LINEARS, "head"]), *((name, 20) for name in LINEARS)]
    assert [(speed.operator, speed.rows, speed.context) for speed in roofline.operators if speed.context] == [
        ("attention", 1, 5), ("attention", 2, 5), ("attention", 1, 70), ("rest", 1, 5), ("rest", 2, 5)]
    layers = loaded.config.num_layers
    assert all(speed.layers == (1 if speed.operator in ("head", "rest") else layers)
               for speed in roofline.operators)
    assert (roofline.model, roofline.label) == (loaded.uri, "bf16")
    assert Roofline.model_validate_json(roofline.model_dump_json()) == roofline


def test_the_weights_of_all_operators_are_those_of_a_step(roofline, loaded):
    """What one more row adds is its own: what is left of one row's bytes are weights."""
    by_rows = {(speed.operator, speed.rows): speed for speed in roofline.operators if not speed.context}
    total = sum(speed.layers * (2 * speed.bytes - by_rows[name, 2].bytes)
                for (name, rows), speed in by_rows.items() if rows == 1)
    assert total == loaded.model.step_bytes


def test_operations_are_counted_by_hand(roofline, loaded):
    config = loaded.config
    hidden = config.hidden_size
    inner = config.intermediate_size
    kv = config.num_kv_heads * config.head_dim
    heads = config.num_heads * config.head_dim
    numbers = {"q+k+v": hidden * (heads + 2 * kv), "o": heads * hidden, "gate+up": 2 * hidden * inner,
               "down": inner * hidden, "head": hidden * config.vocab_size}
    for speed in roofline.operators:
        if speed.operator in numbers:
            assert speed.operations == 2 * speed.rows * numbers[speed.operator]
        elif speed.operator == "attention":
            slots = speed.context + 1  # the token itself
            assert speed.operations == 4 * speed.rows * heads * slots
            assert speed.bytes == speed.rows * (2 * 2 * kv * slots + 2 * 4 * heads)


def plain_arithmetic():
    """What weights of bfloat16 are multiplied in; attention is in float32 everywhere."""
    return "bf16" if cpu_machine.isa().bf16 else "float32"


def test_predictions_follow_from_bytes_operations_and_ceilings(roofline):
    ceilings = roofline.ceilings
    assert ceilings.read_bytes_s > 0 and set(ceilings.operations_s) == {"float32", plain_arithmetic()}
    for speed in roofline.operators:
        memory, compute = (speed.bytes / ceilings.read_bytes_s,
                           speed.operations / ceilings.operations_s[speed.arithmetic])
        assert speed.predicted_s == pytest.approx(max(memory, compute))
        assert speed.bound == ("compute" if compute > memory else "memory")
        assert (speed.bound == "compute") == (speed.bound_from is not None and speed.rows >= speed.bound_from)
        assert speed.intensity == speed.operations / speed.bytes
        assert 0 <= speed.seconds.low <= speed.seconds.median <= speed.seconds.high
        assert speed.operator == "rest" or speed.seconds.low > 0


def test_measuring_leaves_the_model_as_it_is(tiny):
    model, tokens = load(str(tiny)), torch.arange(5, 25)[None]
    before = model.model(tokens)
    measure_roofline(model, rows=(1, 20), contexts=(5,))
    assert torch.equal(model.model(tokens), before)


def test_a_kv_codec_makes_attention_smaller_and_nothing_else(loaded):
    plain, coded = (measure_roofline(loaded, rows=(1,), contexts=(200,), kv=parse_kv(kv))
                    for kv in ("none", "int8"))
    sizes = [{speed.operator: speed.bytes for speed in result.operators} for result in (plain, coded)]
    assert sizes[1].pop("attention") < sizes[0].pop("attention") and sizes[0] == sizes[1]


def test_layers_of_different_formats_are_different_operators(tiny, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    down = RECIPE.format(match="model.layers.0.mlp.down_proj", strategy="channel")
    recipe.write_text(down, encoding="utf-8")
    quantize(str(tiny), str(recipe), tmp_path / "out")
    result = measure_roofline(load(str(tmp_path / "out")), rows=(1,), contexts=(5,))
    names = [speed.operator for speed in result.operators if speed.operator.startswith("down")]
    assert len(names) == 2 and any("int8" in name for name in names) and any("bf16" in name for name in names)
    arithmetic = Counter(speed.arithmetic for speed in result.operators)
    assert arithmetic["int16"] == 1
    assert set(result.ceilings.operations_s) == {"int16", "float32", plain_arithmetic()}


def test_a_model_that_runs_operation_by_operation_is_refused(tiny, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(match='"*o_proj"', strategy="group, size: 8"), encoding="utf-8")
    quantize(str(tiny), str(recipe), tmp_path / "out")
    model = load(str(tmp_path / "out"))
    with pytest.raises(UsageError, match="can't be measured one by one") as caught:
        measure_roofline(model)
    assert caught.value.why == model.fallback_reason and "bench decode" in caught.value.next


@pytest.mark.parametrize("options", [{"contexts": (9999,)}, {"rows": (0,)}, {"rows": ()}])
def test_nothing_to_measure_is_an_error(loaded, options):
    with pytest.raises(UsageError, match="nothing to measure") as caught:
        measure_roofline(loaded, **options)
    assert "512" in caught.value.why


def test_without_kernels_it_says_what_to_give(monkeypatch):
    for module in (cpu_linear, cpu_machine):
        monkeypatch.setattr(module, "reason_against_kernels", lambda: "llvmlite is not installed")
    with pytest.raises(UsageError, match="can't be measured") as caught:
        ceilings.cpu_ceilings()
    assert "--bandwidth and --flops" in str(caught.value.next)


CEILINGS = MachineCeilings(read_bytes_s=100.0, operations_s={"int8": 1000.0, "float32": 250.0})


def test_operations_of_two_kinds_take_their_times_one_after_the_other():
    cost = OperatorCost(0, 1, {"int8": 200, "float32": 100})
    assert cost.compute_s(2, CEILINGS) == pytest.approx(2 * (0.2 + 0.4)) and cost.arithmetic == "int8"
    assert cost.operations(2) == 600


@pytest.mark.parametrize(("fixed", "row", "operations"), [
    (1000, 10, 200), (0, 10, 200), (1, 0, 1), (999, 7, 71), (12345, 1, 11), (100, 0, 1000), (30, 9, 100)])
def test_it_is_bound_by_compute_from_there_on_and_by_memory_before(fixed, row, operations):
    cost = OperatorCost(fixed, row, {"int8": operations})
    first = cost.bound_from(CEILINGS)
    assert cost.bound(first, CEILINGS) == cost.bound(10 * first, CEILINGS) == "compute"
    assert first == 1 or cost.bound(first - 1, CEILINGS) == "memory"


@pytest.mark.parametrize(("label", "arithmetic"), [
    ("bf16", plain_arithmetic()), ("int8", "int16"), ("int8 a8", "int8"), ("fp8", "float32"),
    ("fp8 a8", "float32"), ("int4 g32", "int8"), ("nf4 b64", "int16")])
def test_what_a_format_is_multiplied_in(label, arithmetic):
    assert arithmetic_of(packed_weight((64, 128), SPECS[label])) == arithmetic


def test_a_model_with_experts_is_refused(tmp_path):
    model = load(str(tiny_model(tmp_path / "experts", "mixtral")))
    with pytest.raises(UsageError, match="can't be measured one by one") as caught:
        measure_roofline(model)
    assert "depends on the tokens" in caught.value.why
