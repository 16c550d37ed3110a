"""Specifications of charts: the numbers in them, and none where there is nothing to show."""

import pytest

from quantkit.evaluation.report.base import COLORS, SHAPES, variant_looks
from quantkit.evaluation.report.charts import frontier, quality, roofline, speed
from quantkit.evaluation.report.charts.base import log_axis
from quantkit.evaluation.report.frontier import frontiers

from .rich import rich_result


@pytest.fixture
def looks(rich):
    return variant_looks(rich.rows)


def values(spec, **wanted):
    """The rows of a specification's data sets that have these fields."""
    rows = {}
    for data in spec["datasets"].values():
        for row in data:
            if all(row.get(key) == value for key, value in wanted.items()):
                rows[tuple(sorted(map(str, row.items())))] = row
    return list(rows.values())


def named(spec, name):
    return next(part for part in spec["layer"] if part.get("name") == name)


def rows_of(spec, name):
    return spec["datasets"][named(spec, name)["data"]["name"]]


def test_a_color_a_model_and_a_shape_a_setting(looks):
    assert [look.color for look in looks[::3]] == list(COLORS[:5])
    assert [look.shape for look in looks[:3]] == list(SHAPES[:3])
    assert len({(look.color, look.shape) for look in looks}) == 15


def test_the_frontier_tells_apart_what_is_beaten(rich, looks):
    spec = frontier.frontier_spec(rich, frontiers(rich)[0], looks)
    beaten = rows_of(spec, "dominated")
    best = rows_of(spec, "best")
    assert [row["variant"] for row in beaten] == ["SmolLM2-360M-Instruct kv int4", "nf4 kv none",
                                                  "nf4 kv int8",
                                                  "nf4 kv int4"]
    assert len(best) == 11 and best[0]["kl"] == 0.0011 and best[0]["KL"] == "0", "drawn there, told as it is"
    assert named(spec, "stair")["mark"]["interpolate"] == "step-before"
    scale = named(spec, "best")["encoding"]["y"]["scale"]
    assert scale["type"] == "log" and scale["domain"][0] < 0.0011


def test_bytes_are_told_in_the_tooltip(rich, looks):
    spec = frontier.frontier_spec(rich, frontiers(rich)[1], looks)
    assert named(spec, "stair")["mark"]["interpolate"] == "step-after"
    assert rows_of(spec, "best")[0]["bytes"] == "745 MB"
    fields = [tip["field"] for tip in named(spec, "best")["encoding"]["tooltip"]]
    assert fields == ["variant", "method", "KL", "flips", "perplexity", "decode", "bits a weight", "bytes"]


def test_memory_is_stacked_and_summed(rich, looks):
    spec = speed.memory(rich, looks)
    parts = values(spec, variant="int8 kv none", context=4096)
    stacked = {row["part"]: row["GB"] for row in parts if "part" in row}
    total, = [row for row in parts if "part" not in row]
    assert list(stacked) == ["weights", "workspace", "KV cache"]
    assert total["GB"] == pytest.approx(sum(stacked.values())) and total["text"] == "626 MB at 4,096"


def test_the_roof_bends_where_memory_meets_arithmetic(rich):
    spec = roofline.roofline_spec(rich.roofline[0])
    ceilings = rich.roofline[0].ceilings
    lines = [row for row in values(spec) if "ceiling" in row]
    flat = [row for row in lines if row["ceiling"] == "bf16"]
    assert {row["measured"] for row in flat} == {0.82e12}
    assert min(row["at"] for row in flat) == pytest.approx(0.82e12 / 38.4e9)
    slope = [row["measured"] / row["at"] for row in lines if row["ceiling"] == "memory"]
    assert slope == pytest.approx([ceilings.read_bytes_s] * 2)
    operators = [row for row in values(spec) if "predicted" in row]
    assert len(operators) == 22 and all(row["measured"] < row["predicted"] for row in operators)


def test_the_map_has_a_cell_a_linear(rich):
    rich.sensitivity += [("lm_head", 0.5), ("model.layers.3.mlp.none", 0.0)]
    cells = values(quality.sensitivity_spec(rich))
    assert len(cells) == 32 * 7, "what is in no layer, or costs nothing, has no place on it"
    assert {cell["kind"] for cell in cells} >= {"q_proj", "down_proj"}


def test_tasks_are_differences_in_points(rich, looks):
    row, = values(quality.tasks_spec(rich, looks), variant="int8 kv none", task="piqa · acc")
    test = next(test for test in rich.rows[3].differences if test.metric == "piqa/acc")
    assert row["change"] == pytest.approx(100 * test.difference) and row["verdict"].startswith("indisting")


def test_nothing_measured_makes_no_chart(make_result, make_row):
    result = make_result([make_row("one", prefill=None)])
    looks = variant_looks(result.rows)
    assert [chart(result, looks) for chart in (
        quality.texts_spec, quality.tasks_spec, speed.by_batch, speed.by_context, speed.prefill,
        speed.first_token,
        speed.gaps, speed.memory)] == [None] * 8
    assert quality.sensitivity_spec(result) is None


def test_logarithmic_axes_have_few_numbers():
    assert log_axis(0.0005, 0.4).to_dict()["values"] == [0.001, 0.01, 0.1]
    assert log_axis(0.05, 0.9).to_dict()["values"] == [0.05, 0.1, 0.2, 0.5]


def test_prefill_at_one_prompt_is_bars_with_their_range(rich, looks):
    for row in rich.rows:
        row.speed = row.speed.model_copy(update={"prefill": row.speed.prefill[:1]})
    for spec in (speed.prefill(rich, looks), speed.first_token(rich, looks)):
        bars, ranges = spec["layer"]
        assert bars["mark"]["type"] == "bar" and ranges["mark"]["type"] == "rule"
        assert len(values(spec)) == len(rich.rows) and "128 tokens of the prompt" in spec["description"]
    many = speed.prefill(rich_result(), looks)
    assert many["layer"][0]["mark"]["type"] == "line"
