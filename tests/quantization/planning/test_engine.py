"""Recipes for other engines: the smallest checkpoint that each one loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantkit.checkpoint.engines import reason_against
from quantkit.quantization.planning.plan import Plan, make_plan
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.support.errors import RecipeError
from tests.helpers.shapes import Source

WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 256}


class Wide(Source):
    """As wide as llama.cpp's superblocks."""

    def __init__(self, tied: bool) -> None:
        super().__init__(tied)
        self.settings = WIDE

    def tensors(self):
        infos = super().tensors()
        sizes = {64: 256, 32: 128, 96: 512, 80: 256}
        return {name: replace(info, shape=tuple(sizes[size] for size in info.shape))
                for name, info in infos.items()}


def plan_for(engine: str, name: str, tied: bool = False) -> Plan:
    return make_plan(load_recipe(name).model_copy(update={"engine": engine}), Wide(tied))


def outside(plan: Plan) -> dict[str, str]:
    """Specs of what is outside of the decoder layers, where they are quantized."""
    return {row.name: row.spec.label() for row in plan.rows if row.layer is None and row.spec}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["int4", "int8", "int4-asym", "nf4", "int4-sym"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers", "mlx"])
def test_what_is_planned_for_an_engine_is_loaded_by_it(engine, name, tied):
    try:
        plan = plan_for(engine, name, tied)
    except RecipeError as error:
        assert (engine, name) in {("vllm", "nf4"), ("mlx", "nf4")}
        assert error.what == f"{engine} loads no checkpoint of recipe {name!r}" and error.why
        return
    rows = [row.recorded() for row in plan.rows]
    assert reason_against(engine, Wide(tied).config(), rows) is None
    assert plan.disk_bytes >= make_plan(load_recipe(name), Wide(tied)).disk_bytes or engine == "mlx"
    assert plan.recipe.snapshot()["for"] == engine


def test_each_engine_gets_as_much_quantized_as_it_loads():
    embedding, head = {"model.embed_tokens": "int4 g64 sym"}, "int6 g64 asym"
    assert outside(plan_for("quantkit", "int4")) == {**embedding, "lm_head": head}
    assert outside(plan_for("vllm", "int4")) == {**embedding, "lm_head": "int8 g64 sym"}
    assert outside(plan_for("transformers", "int4")) == {"lm_head": "int6 g64 sym"}
    assert outside(plan_for("transformers", "nf4")) == {}
    assert outside(plan_for("quantkit", "int4", tied=True)) == {"model.embed_tokens": "int6 g64 asym"}
    assert outside(plan_for("vllm", "int4", tied=True)) == {}
    assert outside(plan_for("mlx", "int4", tied=True)) == {"model.embed_tokens": "int6 g64 min"}


@pytest.mark.parametrize(("engine", "formats"), [
    ("mlx", {"mlx"}), ("llama.cpp", {"gguf-q4_k", "gguf-q8_0"})])
def test_engines_with_layouts_of_their_own_get_them(engine, formats):
    assert {row.format for row in plan_for(engine, "int4-asym").rows} == formats


@pytest.mark.parametrize(("engine", "bits"), [
    ("quantkit", 6), ("transformers", 6), ("vllm", 8), ("sglang", 8)])
def test_bits_that_an_engine_has_not_become_eight(engine, bits):
    group = {"granularity": {"strategy": "group", "size": 32}}
    recipe = Recipe.model_validate({"name": "mine", "for": engine, "rules": [
        {"match": "lm_head", "optional": True},
        {"match": "*.down_proj", "method": "rtn", "spec": {"bits": 6, **group}},
        {"match": "*", "method": "rtn", "spec": {"bits": 4, **group}}]})
    rows = [row for row in make_plan(recipe, Wide(False)).rows if row.spec]
    assert {row.spec.bits for row in rows if row.name.endswith("down_proj")} == {bits}
    assert {row.spec.bits for row in rows if not row.name.endswith("down_proj")} == {4}


@pytest.mark.parametrize(("engine", "label"), [("quantkit", "int4 g64 asym"), ("vllm", "int4 g64 asym"),
                                               ("transformers", "int4 g64 sym")])
def test_zero_points_are_left_out_for_an_engine_without_them(engine, label):
    rows = [row for row in plan_for(engine, "int4-asym").rows if row.layer is not None]
    assert {row.spec.label() for row in rows} == {label}


def test_a_recipe_names_its_engine_and_the_default_leaves_no_trace():
    recipe = load_recipe("int4")
    assert "for" not in recipe.snapshot() and not {"tied", "layers"} & {*recipe.snapshot()["rules"][0]}
    again = Recipe.model_validate({"name": "mine", "for": "transformers", "rules": [
        rule.model_dump() for rule in recipe.rules]})
    assert outside(make_plan(again, Wide(False))) == {"lm_head": "int6 g64 sym"}
    with pytest.raises(ValueError, match="for"):
        Recipe.model_validate({"name": "mine", "for": "ollama", "rules": [{"match": "*"}]})


@pytest.mark.parametrize(("engine", "name", "why"), [
    ("llama.cpp", "trellis3", "llama.cpp has no type for trellis3"),
    ("vllm", "trellis3", "vllm reads"), ("transformers", "trellis3", "transformers reads")])
def test_what_no_variant_makes_loadable_is_refused(engine, name, why):
    with pytest.raises(RecipeError, match=f"{engine} loads no checkpoint") as caught:
        plan_for(engine, name)
    assert why in caught.value.why


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "trellis3"])
def test_who_extends_a_recipe_may_say_something_else_of_embedding_and_head(tmp_path, name, tied):
    path = tmp_path / "mine.yaml"
    path.write_text(f"""extends: {name}
rules:
  - match: "re:model\\\\.embed_tokens|lm_head"
    method: rtn
    spec: {{bits: 5, granularity: {{strategy: channel}}}}
""")
    plan = make_plan(load_recipe(str(path)), Wide(tied))
    assert set(outside(plan).values()) == {"int5 channel sym"} and len(outside(plan)) == 2 - tied


def test_a_rule_for_tied_models_is_none_of_others():
    rules = [{"match": "model.embed_tokens", "tied": tied, "method": "rtn",
              "spec": {"bits": bits, "granularity": {"strategy": "channel"}}} for tied, bits in
             ((True, 8), (False, 4))]
    recipe = Recipe.model_validate({"name": "mine", "rules": rules})
    assert [make_plan(recipe, Source(tied)).rows[0].spec.bits for tied in (True, False)] == [8, 4]
