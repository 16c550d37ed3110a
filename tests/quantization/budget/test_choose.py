"""From candidates and a budget to an ordinary recipe."""

from __future__ import annotations

import itertools

import pytest

from quantkit.checkpoint.engines import check_engine
from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import linear_slots, parse_config
from quantkit.quantization.budget.amount import parse_budget
from quantkit.quantization.budget.choose import choose, labels_of
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import CalibrationSpec, Candidate, Recipe, Rule, TransformSpec, load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import RecipeError, UsageError
from quantkit.testing import FAMILIES, tiny_model

CALIBRATION = CalibrationSpec(windows=4, window=48)


def candidate(bits: int, size: int | None = 32, method: str = "rtn", **more) -> Candidate:
    granularity = Granularity(strategy="group", size=size) if size else Granularity(strategy="channel")
    return Candidate(method=method, spec=QuantSpec(bits=bits, granularity=granularity), **more)


LADDER = (*(candidate(bits) for bits in (2, 3, 4, 6)), candidate(8, None), Candidate())


def recipe(*rules: Rule, candidates=LADDER, **more) -> Recipe:
    return Recipe(name="r", calibration=CALIBRATION, rules=rules, candidates=candidates, **more)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(str(tiny_model(tmp_path_factory.mktemp("models") / "tiny")))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("text", ["5bpw", "6bpw", "88000B"])
def test_a_quantized_embedding_is_no_linear(source, bits, text):
    table = Rule(match="model.embed_tokens", **candidate(bits, None).model_dump(exclude_none=True))
    choice = chosen(source, text, table)
    if text.endswith("bpw"):
        assert float(text[:-3]) - 0.5 < choice.plan.bits_per_weight <= float(text[:-3])
        assert choice.chosen == chosen(source, text).chosen
    else:
        assert 80_000 < choice.plan.disk_bytes <= 88_000
    rows = [row for row in choice.plan.rows if row.name in choice.chosen]
    four = next(one for one in choice.uniform if one.label == "int4 g32 sym")
    weights = sum(row.shape[0] * row.shape[1] for row in rows)
    size = weights * 4.5 / 8 + 16 * len(rows)
    assert four.bits == pytest.approx(8 * size / weights)
    assert four.disk_bytes == choice.plan.disk_bytes - sum(row.bytes_after for row in rows) + size


def test_candidates_that_differ_in_method_or_options_are_told_apart(source):
    alike = (candidate(4), candidate(4, method="gptq"),
             candidate(4, method="gptq", options={"descent_passes": 2}), candidate(8))
    labels = ["rtn int4 g32 sym", "gptq int4 g32 sym #2", "gptq int4 g32 sym #3", "int8 g32 sym"]
    assert labels_of(alike) == labels
    choice = chosen(source, "5bpw", candidates=alike)
    assert all(list(one["predicted_kl"]) == labels for one in choice.to_dict()["layers"].values())
    assert {one.label for one in choice.uniform} == set(labels)
    assert sum(n for part in choice.parts() for n in part.counts.values()) == 8


def chosen(source, text, *rules, **more):
    return choose(source, recipe(*rules, **more), parse_budget(text))


@pytest.mark.parametrize("bits", [2.8, 3.5, 4.25, 5, 7, 12])
def test_bits_stay_within_the_budget_and_what_is_left_affords_nothing(source, bits):
    choice = chosen(source, f"{bits}bpw")
    assert choice.plan.bits_per_weight <= bits and choice.plan.recipe == choice.recipe
    assert choice.plan.bits_per_weight == make_plan(choice.recipe, source).bits_per_weight
    weights = sum(row.shape[0] * row.shape[1] for row in choice.plan.rows)
    left = bits * weights / 8 - sum(row.bytes_after for row in choice.plan.rows)
    assert left < weights / 8, "a bit for every weight is left over"


@pytest.mark.parametrize("size", [70_000, 80_000, 100_001])
def test_bytes_are_those_of_the_tensors_on_disk(source, size, tmp_path):
    choice = chosen(source, f"{size}B")
    made = quantize(source.uri, choice.recipe, tmp_path / "out").out
    with Checkpoint.open(made) as checkpoint:
        stored = sum(info.nbytes for info in checkpoint.infos.values())
    assert stored == choice.plan.disk_bytes <= size


def test_more_room_never_costs_more_and_the_mix_is_no_worse_than_one_width(source):
    found = [chosen(source, f"{bits}bpw") for bits in (3, 3.5, 4, 4.5, 6, 9)]
    assert [one.kl for one in found] == sorted((one.kl for one in found), reverse=True)
    for one in found[0].uniform:
        assert chosen(source, f"{one.disk_bytes}B").kl <= one.kl * (1 + 2e-5)
    assert [one.label for one in found[0].uniform] == [c.label() for c in LADDER[:-1]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_fused_layers_get_the_same_and_engines_take_them(tmp_path, family):
    source = open_source(str(tiny_model(tmp_path / "model", family, **(
        {"max_window_layers": 4} if family.startswith("qwen") else {}), num_hidden_layers=4)))
    pair = (candidate(4), candidate(8, None))
    choice = chosen(source, "6bpw", candidates=pair)
    assert len(set(choice.chosen.values())) == 2
    of = {slot.name: slot.shares for slot in linear_slots(parse_config(source.config()))}
    for one, other in itertools.combinations(choice.chosen, 2):
        layer = one.partition(".experts.")[0]
        if of[one] == of[other] or (".experts." in one and other.startswith(f"{layer}.experts.")):
            assert choice.chosen[one] == choice.chosen[other]
    if family == "llama":
        out = quantize(source.uri, choice.recipe, tmp_path / "out").out
        with Checkpoint.open(out) as checkpoint:
            checks = {check.name: check.status for check in check_engine("vllm", checkpoint)}
        assert checks["fused layers"] == checks["layout"] == "ok" and verify(out).ok


def test_what_rules_decide_counts_and_stays(source):
    rules = (Rule(match="*.down_proj"), Rule(match="model.layers.0.*", method="rtn", spec=LADDER[4].spec))
    choice = chosen(source, "8bpw", *rules)
    assert choice.recipe.rules[:2] == rules and choice.plan.bits_per_weight <= 8
    assert all(row.spec is None for row in choice.plan.rows if row.name.endswith("down_proj"))
    assert {row.spec.bits for row in choice.plan.rows if row.layer == 0 and row.spec} == {8}
    assert list(choice.chosen) == [f"model.layers.1.{part}_proj" for part in (
        "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")]


def test_a_candidate_that_fits_some_layers_is_chosen_there(source):
    choice = chosen(source, "4.5bpw", candidates=(candidate(4, 128), candidate(4, 32)))
    assert {row.spec.granularity.size for row in choice.plan.rows if row.shape[1] == 64} == {32}
    assert {row.spec.granularity.size for row in choice.plan.rows if row.shape[1] == 128} <= {32, 128}
    assert [one.label for one in choice.uniform] == ["int4 g32 sym"]


def test_what_it_tells(source):
    choice = chosen(source, "4.25bpw")
    data = choice.to_dict()
    assert data["budget"] == "4.25bpw" and data["predicted_kl"] == choice.kl
    assert len(data["layers"]) == 14 and set(data["layers"]["model.layers.0.mlp.up_proj"]) == {
        "chosen", "predicted_kl"}
    parts = choice.parts()
    assert [part.names for part in parts] == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
    assert sum(part.kl for part in parts) == pytest.approx(choice.kl)
    assert all(sum(part.counts.values()) == 2 for part in parts)
    assert choice.recipe.description.startswith("Chosen for 4.25bpw from the candidates of r; predicted KL")


@pytest.mark.parametrize("text, said", [("1bpw", "less than any"), ("2.2bpw", "less than any"),
                                        ("16bpw", "more than any"), ("1GB", "more than any"),
                                        ("40kB", "less than any")])
def test_a_budget_out_of_range_says_what_can_be_had(source, text, said, kept):
    with pytest.raises(UsageError, match=said) as caught:
        chosen(source, text)
    assert "2.53bpw" in caught.value.why and "16bpw" in caught.value.why and not kept.exists()
    if "less" in said:
        assert caught.value.next.startswith("the same command with --budget ")
        assert chosen(source, caught.value.next.split()[-1]).plan.bits_per_weight < 2.6


@pytest.mark.parametrize("text, fits", [("4.51bpw", True), ("4.52bpw", True), ("4.55bpw", False)])
def test_what_the_largest_choice_takes_is_a_budget(source, text, fits):
    """It takes 4.516 bits: named rounded up."""
    ladder = (candidate(2), candidate(4))
    if fits:
        assert set(chosen(source, text, candidates=ladder).chosen.values()) <= {0, 1}
    else:
        with pytest.raises(UsageError, match="more than any choice takes"):
            chosen(source, text, candidates=ladder)


@pytest.mark.parametrize("change, said", [
    ({"candidates": ()}, "has no candidates"),
    ({"calibration": CalibrationSpec(importance="equal")}, "importance: equal"),
    ({"rules": (Rule(match="*"),)}, "leave no layer"),
    ({"candidates": (candidate(4, 128), candidate(8, 128))}, "doesn't fit"),
    ({"candidates": (candidate(4, format="gptq"), candidate(8, format="gptq"))}, "can't be mixed"),
    ({"candidates": (Candidate(method="rtn", spec=QuantSpec(
        bits=8, granularity=Granularity(strategy="channel"), activations="token")),)}, "activations"),
    ({"candidates": (Candidate(method="none", spec=LADDER[0].spec),)}, "'none'"),
    ({"transforms": (TransformSpec(name="awq"),)}, "the transform awq"),
    ({"transforms": (TransformSpec(name="smoothquant"),)}, "the transform smoothquant"),
    ({"rules": (Rule(match="*.q_proj", **candidate(4).model_dump(exclude_none=True)),),
      "candidates": (candidate(4, format="gptq"),)}, "its rules make of model.layers.0.self_attn.q_proj"),
])
def test_recipes_that_give_no_choice(source, change, said, kept):
    with pytest.raises(RecipeError) as caught:
        choose(source, recipe().model_copy(update=change), parse_budget("4bpw"))
    assert said in str(caught.value) and caught.value.next and not kept.exists()


def test_a_head_of_its_own_needs_a_rule(tmp_path):
    source = open_source(str(tiny_model(tmp_path / "model", tie_word_embeddings=False)))
    with pytest.raises(RecipeError, match="no rule for lm_head"):
        chosen(source, "4bpw")
    assert chosen(source, "10bpw", Rule(match="lm_head")).plan.bits_per_weight <= 10


def test_a_recipe_with_candidates_is_nothing_without_a_budget(source):
    with pytest.raises(RecipeError, match="leaves a choice") as caught:
        make_plan(recipe(), source)
    assert "--budget" in caught.value.next


def test_the_shipped_candidates_fit_every_budget_between_2_and_16_bits(source):
    mixed = load_recipe("mixed").model_copy(update={"calibration": CALIBRATION})
    choice = choose(source, mixed, parse_budget("3.3bpw"))
    assert {c.spec.label() if c.spec else None for c in choice.candidates} >= {
        "int2 g64 sym", "int3 g64 sym", "int4 g64 sym", "int8 channel sym", None}
    assert all(len(costs) == len(choice.candidates) for costs in choice.costs.values())
    assert choice.plan.bits_per_weight <= 3.3 and "candidates" not in choice.recipe.snapshot()
