from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from quantkit.ops import cpu_linear
from quantkit.ops.cpu_linear import fastest_window
from quantkit.quantization import recipe as recipes
from quantkit.quantization.recipe import Recipe, Rule, list_recipes, load_recipe
from quantkit.support.errors import RecipeError
from quantkit.support.paths import data_dir
from quantkit.support.safe_yaml import MAX_ANCHORS, MAX_BYTES, MAX_DEPTH, parse_yaml
from quantkit_kernels.cpu import isa as cpu_isa

GOOD = """\
description: good
rules:
  - match: lm_head
    optional: true
  - match: "*"
    method: rtn
    spec:
      bits: 4
      granularity: {strategy: group, size: 64}
"""
SHIPPED = {"int8": "int8 channel sym", "int8-gptq": "int8 channel sym", "int5-asym": "int5 g64 asym",
           "int4": "int4 g64 asym", "int4-sym": "int4 g64 sym", "int4-asym": "int4 g64 asym",
           "int4-rtn": "int4 g64 sym", "int8-head8-draft": "int8 g32 sym",
           "int3": "int3 g64 sym", "int2": "int2 g64 asym",
           "int4-awq": "int4 g64 sym", "int4-autoround": "int4 g64 sym",
           "w8a8-smooth": "int8 channel sym a8", "w8a8": "int8 channel sym a8", "fp8": "fp8 channel a8",
           **{f"trellis{bits}": f"trellis{bits} channel WINDOW rot" for bits in (2, 3, 4)},
           **{f"int{bits}-datafree": f"int{bits} g64 asym" for bits in (2, 3, 4)},
           "int8-datafree": "int8 g64 sym",
           **{f"nvfp4{end}": "fp4 g16 e4m3" for end in ("", "-datafree")}, "nvfp4-a4": "fp4 g16 e4m3 a4",
           **{f"mxfp4{end}": "fp4 g32 e8m0" for end in ("", "-datafree")}, "mxfp4-a4": "fp4 g32 e8m0 a4",
           "fp8-block": "fp8 t128 a8",
           "nf4": "nf4 b64", "nf4-nested": "nf4 b64 nested", "int8-kv8": "int8 channel sym"}

MIXED = ("mixed", "mixed-trellis", "embedding-head")
"""Those whose candidates a budget chooses from, and the one that others extend."""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Recipe folders ``a`` and ``b`` of two distributions, in place of the shipped ones."""
    for name in "ab":
        (tmp_path / name).mkdir()

    class Manager:
        def files(self, hook):
            assert hook == "recipe_dirs"
            owners = {name: SimpleNamespace(distribution=f"dist-{name}") for name in "ab"}
            return [(owners[name], path) for name in "ab"
                    for path in sorted((tmp_path / name).glob("*.yaml"))]

    monkeypatch.setattr(recipes, "current", Manager)
    return tmp_path


def refusal(text: str | bytes) -> str:
    raw = text.encode() if isinstance(text, str) else text
    with pytest.raises(RecipeError) as caught:
        parse_yaml(raw, "x.yaml").build(Recipe)
    return str(caught.value)


# -- the shipped ones


GGUF = {"gguf-q8_0": [("int8 g32 sym", None)], "gguf-q4_0": [("int4 g32 sym", None)],
        "gguf-iq4_nl": [("iq4 g32", None)], "gguf-q6_k": [("int6 g16 sym s8", "gguf-q8_0")],
        "gguf-q4_k_m": [("int6 g16 sym s8", "gguf-q8_0"), ("int4 g32 min s6", "gguf-q5_0")],
        "gguf-q5_k_m": [("int6 g16 sym s8", "gguf-q8_0"), ("int5 g32 min s6", "gguf-q5_1")]}
"""Specs and fallbacks of the rules behind that of the head."""
MLX = {"mlx-4bit": "rtn", "mlx-4bit-tied": "gptq"}
"""What they do with the embedding."""


def rule_of(recipe: Recipe, layer: str, tied: bool = False) -> Rule | None:
    """The first rule that takes a layer."""
    return next((rule for rule in recipe.rules if rule.matches(layer, tied, 12)), None)


def test_a_rule_may_be_for_some_decoder_layers_only():
    rule = Rule(match="model.layers.*", layers=(0, -2, -1))
    names = [*(f"model.layers.{number}.mlp.up_proj" for number in range(12)), "lm_head"]
    assert [name.split(".")[2] for name in names if rule.matches(name, count=12)] == ["0", "10", "11"]
    assert [rule.matches("model.layers.1.mlp.up_proj", count=count) for count in (2, 3, 4)] == [
        True, True, False]
    share = Rule(match="model.layers.*", layers=0.25)
    assert [name.split(".")[2] for name in names if share.matches(name, count=12)] == [
        "0", "1", "2", "9", "10", "11"]
    assert [share.matches("model.layers.1.mlp.up_proj", count=count) for count in (2, 3, 5)] == [
        True, False, True]
    for wrong in ((), 0.0, 0.6):
        with pytest.raises(ValueError):
            Rule(match="*", layers=wrong)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_quantize_embedding_and_head_unless_they_are_of_other_engines(name):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.description.endswith(".") and "\n" not in recipe.description
    outside = [rule_of(recipe, "model.embed_tokens", tied=True), rule_of(recipe, "model.embed_tokens"),
               rule_of(recipe, "lm_head")]
    labels = [rule and rule.spec and rule.spec.label() for rule in outside]
    if name == "int8-head8-draft":
        assert labels == [None, None, "int8 g32 sym"]
    elif name.startswith(("w8a8", "fp8", "nvfp4", "mxfp4")):
        assert labels == [None] * 3
    elif name.startswith("int8"):
        assert labels == ["int8 channel sym"] * 3
    else:
        assert labels == ["int6 g64 asym", "int4 g64 sym",
                          "int6 g64 asym" if name == "int4" else "int8 channel sym"]
    assert all(rule.method in (None, "rtn") for rule in outside if rule)
    rest = rule_of(recipe, "model.layers.3.mlp.up_proj")
    assert rest.spec.label() == SHIPPED[name].replace("WINDOW", f"w{fastest_window()}")
    assert rest.format_name == {"nf4": "bnb-nf4", "w8a": "int-quantized", "fp8": "float-quantized",
                                "tre": "trellis", "nvf": "nvfp4-pack-quantized",
                                "mxf": "mxfp4-pack-quantized"}.get(name[:3], "pack-quantized")
    calibrated = rest.method in ("gptq", "autoround") or bool(recipe.transforms)
    assert (recipe.calibration is not None) == calibrated


@pytest.mark.parametrize("isa, window", [("AMX", 8), ("VNNI", 8), ("NEON", 8), ("AVX2", 12), ("PLAIN", 12)])
def test_a_trellis_has_the_window_that_the_machine_decodes_fastest(monkeypatch, tmp_path, isa, window):
    monkeypatch.setattr(cpu_linear, "isa", lambda: getattr(cpu_isa, isa))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load_recipe("trellis3").rules[0].spec.window == window
    own, shipped = tmp_path / "own.yaml", Path(str(data_dir("recipes"))) / "trellis3.yaml"
    own.write_text(shipped.read_text().replace("kind: trellis", "kind: trellis, window: 10"))
    assert load_recipe(str(own)).rules[0].spec.window == 10
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert load_recipe("trellis3").rules[0].spec.window == 8


def test_the_list_is_what_is_shipped_and_none_is_broken():
    listed = list_recipes()
    assert [info.name for info in listed] == sorted([*SHIPPED, *MIXED, *MLX, *GGUF])
    assert {info.owner for info in listed} == {"quantkit"} and not any(info.error for info in listed)
    assert {p.stem for p in data_dir("recipes").iterdir()} == {*SHIPPED, *MIXED, *MLX, *GGUF}


@pytest.mark.parametrize("name", GGUF)
def test_those_of_gguf_are_of_llama_cpps_types(name):
    recipe = load_recipe(name)
    head, *rest = recipe.rules
    assert head.matches("lm_head") and head.matches("model.embed_tokens")
    assert not any(rule.matches("model.embed_tokens") for rule in rest)
    assert [(rule.spec.label(), rule.fallback) for rule in rest] == GGUF[name]
    assert all(rule.format_name.startswith("gguf-") for rule in recipe.rules)
    more = [f"model.layers.{i}.mlp.down_proj" for i in (0, 2, 14, 30)]
    less = ["model.layers.1.mlp.down_proj", "model.layers.13.self_attn.v_proj", "model.layers.2.mlp.up_proj"]
    if len(rest) == 2:
        assert all(map(rest[0].matches, more)) and not any(map(rest[0].matches, less))


def test_a_format_brings_its_spec_and_a_fallback_must_have_one():
    rule = {"match": "*", "method": "rtn", "format": "gguf-q4_k", "fallback": "gguf-q5_0"}
    assert Rule(**rule).spec.label() == "int4 g32 min s6"
    with pytest.raises(ValueError, match="needs a spec"):
        Rule(match="*", method="rtn", format="gptq")
    with pytest.raises(ValueError, match="'gptq' is no format that can hold one spec only"):
        Rule(**rule | {"fallback": "gptq"})
    with pytest.raises(ValueError, match="keeps the layer as it is"):
        Rule(match="*", fallback="gguf-q5_0")
    assert "fallback" not in Recipe(name="x", rules=(Rule(match="*"),)).snapshot()["rules"][0]


@pytest.mark.parametrize("name", MLX)
def test_those_of_mlx_quantize_what_mlx_lm_quantizes(name):
    """An embedding is rounded unless it is the head too: else nothing that could be measured is multiplied
    with it."""
    embedding, rest = load_recipe(name).rules
    assert embedding.matches("model.embed_tokens") and embedding.method == MLX[name]
    assert rest.matches("lm_head") and rest.matches("model.layers.3.mlp.up_proj") and rest.method == "gptq"
    assert rest.spec == embedding.spec and rest.spec.label() == "int4 g64 min"
    assert rest.format_name == embedding.format_name == "mlx"


def test_a_snapshot_has_no_folder_of_this_machine():
    recipe = Recipe.model_validate({"name": "x", "calibration": {"text": "/home/ann/secret/text.txt"}})
    assert recipe.snapshot()["calibration"]["text"] == "text.txt"
    assert recipe.calibration.text == "/home/ann/secret/text.txt"


# -- finding


def test_found_by_name_and_by_path(folders):
    (folders / "a" / "mine.yaml").write_text(GOOD)
    (folders / "other.yml").write_text(GOOD)
    assert load_recipe("mine").name == "mine"
    assert load_recipe(str(folders / "other.yml")).name == "other"


def test_a_name_in_two_folders_names_both(folders):
    for name in "ab":
        (folders / name / "mine.yaml").write_text(GOOD)
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine")
    assert "a/mine.yaml (of dist-a)" in caught.value.why and "b/mine.yaml (of dist-b)" in caught.value.why
    assert load_recipe(str(folders / "a" / "mine.yaml")).name == "mine"


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'int4-asym'"):
        load_recipe("int4-assym")
    with pytest.raises(RecipeError, match="can't be read"):
        load_recipe("./nothing.yaml")


def test_a_broken_file_costs_only_itself(folders):
    (folders / "a" / "bad.yaml").write_text("rules: [")
    (folders / "b" / "good.yaml").write_text(GOOD)
    bad, good = list_recipes()
    assert bad.error and "line 1" in bad.error and good.error is None and good.description == "good"


def test_a_named_recipe_is_called_as_its_file(folders):
    (folders / "a" / "mine.yaml").write_text("name: other\n" + GOOD)
    with pytest.raises(RecipeError, match="calls itself 'other'"):
        load_recipe("mine")


# -- extends


def test_a_child_asks_its_rules_first_and_replaces_scalars(folders):
    (folders / "a" / "base.yaml").write_text("calibration: {windows: 3}\n" + GOOD)
    child = folders / "child.yaml"
    child.write_text("extends: base\nrules:\n  - match: '*.down_proj'\n")
    recipe = load_recipe(str(child))
    assert [r.match for r in recipe.rules] == ["*.down_proj", "lm_head", "*"]
    assert (recipe.name, recipe.description, recipe.calibration.windows) == ("child", "good", 3)
    child.write_text("extends: base\ndescription: mine\ncalibration: null\n")
    recipe = load_recipe(str(child))
    assert (recipe.description, recipe.calibration, len(recipe.rules)) == ("mine", None, 2)


@pytest.mark.parametrize("parent", ["../base", "/etc/passwd", "a/base", "base.yaml", "..", ".hidden",
                                    "~/base", "ba\\se", "x" * 100, "", "C:base", 7, ["base"], {"a": 1}, True])
def test_extends_takes_a_plain_name_only(folders, parent):
    (folders / "base.yaml").write_text(GOOD)
    child = folders / "a" / "child.yaml"
    child.write_text(f"description: x\nextends: {json.dumps(parent)}\n" + GOOD.split("\n", 1)[1])
    with pytest.raises(RecipeError, match=r"child.yaml line 2: extends .* is not a recipe's name"):
        load_recipe("child")


def test_extends_in_a_circle(folders):
    for name, parent in (("x", "y"), ("y", "z"), ("z", "x")):
        (folders / "a" / f"{name}.yaml").write_text(f"extends: {parent}\n" + GOOD)
    with pytest.raises(RecipeError, match="circle") as caught:
        load_recipe("x")
    assert "x → y → z → x" in caught.value.why
    with pytest.raises(RecipeError, match="circle"):
        load_recipe(str(folders / "a" / "x.yaml"))


# -- strictness


def test_an_unknown_key_names_line_place_and_nearest():
    said = refusal(GOOD.replace("      bits: 4", "      bitz: 4"))
    assert "line 8: unknown key 'bitz' in rules.1.spec: did you mean 'bits'?" in said
    assert "line 7: rules.1.spec.bits: Field required" in said
    assert "unknown key 'rulez': did you mean 'rules'?" in refusal("name: x\nrulez: []\n")


@pytest.mark.parametrize(("written", "kept"), [
    ("int8", "int8"), ('"window(sinks=4,budget=512) + int8"', "window(512, sinks=4)+int8"), ("none", "none"),
    ("int4+snapkv(0.50)", "snapkv(0.5)+int4"), ("null", None)])
def test_a_kv_setting_is_kept_in_its_canonical_spelling(folders, written, kept):
    (folders / "a" / "lean.yaml").write_text(f"kv: {written}\n{GOOD}")
    recipe = load_recipe("lean")
    assert recipe.kv == kept == recipe.snapshot()["kv"]
    assert Recipe.model_validate(json.loads(json.dumps(recipe.snapshot()))) == recipe
    (folders / "b" / "plain.yaml").write_text(GOOD)
    assert load_recipe("plain").kv is None


@pytest.mark.parametrize(("written", "said"), [
    ("int9", "int8"), ("window", "budget"), ("window(0)", "budget"), ("window(8,sink=3)", "sinks"),
    ("int8+int4", "both a codec"), ('"window("', "can't be read"), ("8", "kv"), ("[int8]", "kv"),
    ("x" * 257, "kv"), ("snapkv(.inf)", "budget"), ('""', "can't be read")])
def test_a_kv_setting_that_cannot_be_names_its_line(folders, written, said):
    (folders / "a" / "broken.yaml").write_text(f"{GOOD}kv: {written}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("broken")
    assert f"line {GOOD.count(chr(10)) + 1}" in str(caught.value) and said in str(caught.value)


def test_a_child_replaces_its_parents_kv_setting_where_it_gives_one(folders):
    (folders / "a" / "base.yaml").write_text(f"kv: int8\n{GOOD}")
    for name, text, kept in (("heir", "", "int8"), ("other", "kv: int4\n", "int4"),
                             ("bare", "kv: null\n", None), ("whole", "kv: none\n", "none")):
        (folders / "a" / f"{name}.yaml").write_text(f"extends: base\n{text}")
        assert load_recipe(name).kv == kept


def test_wrong_values_name_their_line():
    assert "line 8: rules.1.spec.bits" in refusal(GOOD.replace("bits: 4", "bits: '4'"))
    assert "line 8: rules.1.spec.bits" in refusal(GOOD.replace("bits: 4", "bits: 9"))
    assert "line 3: rules.0: Value error, method 'rtn' needs a spec" in refusal(
        "name: x\nrules:\n  - {match: '*', method: rtn}\n")


def test_yaml_is_1_2():
    data = parse_yaml(b"a: no\nb: 1e-5\nc: on\nd: 010\ne: 0o10\n", "x").data
    assert data == {"a": "no", "b": 1e-5, "c": "on", "d": 10, "e": 8}


@pytest.mark.parametrize("text, said", [
    ("a: 1\na: 2\n", "line 2"), ("a: {b: 1, b: 2}\n", "duplicate key"),
    ("a: !!python/object/apply:os.system [id]\n", "tags"), ("a: !!binary aGk=\n", "tags"),
    ("!x {a: 1}", "tags"),
    ("%YAML 1.1\n---\na: no\n", "directives"), ("a: 1\n---\nb: 2\n", "one document"),
    ("- a\n", "must be a mapping"), ("", "must be a mapping"), ("just text", "must be a mapping"),
    ("a: .inf\n", "not finite"), ("a: [.nan]\n", "not finite"), ("a: 2001-01-01\n", "quote it"),
    ('a: "\\ud800"\n', "surrogate"), ('"\\udfff": 1\n', "surrogate"),
    ("1: a\n", "must be text"), ("? [a]\n: b\n", "plain word"), ("a: [\n", "line"), ("a: \x07\n", "x.yaml"),
    ("a: &x [*x]\n", "expand to more"), ("[" * 100, f"deeper than {MAX_DEPTH}"),
    ("a: " + "9" * 5000, "not valid YAML"), ("a: *nothing\n", "line 1"),
    ("\n".join(f"k{i}: &a{i} 1" for i in range(MAX_ANCHORS + 1)), f"more than {MAX_ANCHORS} anchors"),
    ("a: [" + "1," * 30_000 + "]", "more than 20,000 nodes"), ("#" * (MAX_BYTES + 1), "larger than 256 KiB"),
])
def test_hostile_yaml_is_refused(text, said):
    assert said in refusal(text)


def test_bytes_that_are_not_utf8_are_refused():
    assert "not UTF-8 (byte 3)" in refusal(b"a: \xff")


def test_an_alias_bomb_is_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "expand to more than 20,000 nodes" in refusal("\n".join(lines))


def test_harmless_aliases_work():
    text = GOOD + ("  - {match: again, method: rtn, spec: &s {bits: 4, granularity: {strategy: channel}}}\n"
                   "  - {match: more, method: rtn, spec: *s}\nname: x\n")
    rules = parse_yaml(text.encode(), "x").build(Recipe).rules
    assert rules[2].spec == rules[3].spec


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode),
                 st.text("-?:,[]{}#&*!|>'\"%@` \n\tab01<.", max_size=60).map(str.encode)))
def test_any_bytes_give_a_mapping_or_a_recipe_error(raw):
    try:
        data = parse_yaml(raw, "x.yaml").data
    except RecipeError:
        return
    json.dumps(data, allow_nan=False)


plain = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
                     lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=5), s, max_size=3),
                     max_leaves=6)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["name", "description", "calibration", "rules", "x"]),
                       plain | st.lists(st.dictionaries(
                           st.sampled_from(["match", "method", "spec", "options", "format", "optional", "y"]),
                           plain, max_size=4), max_size=3), max_size=4))
def test_any_recipe_is_valid_or_a_recipe_error(data):
    try:
        recipe = parse_yaml(json.dumps(data).encode(), "x.yaml").build(Recipe)
    except RecipeError as error:
        assert error.next == "edit x.yaml"
    else:
        assert Recipe.model_validate(recipe.snapshot()) == recipe


# -- rules


@pytest.mark.parametrize("match, hits", [
    ("*", ["lm_head", "model.layers.1.mlp.up_proj"]), ("lm_head", ["lm_head"]),
    ("*.up_proj", ["model.layers.1.mlp.up_proj"]), ("re:.*up.*", ["model.layers.1.mlp.up_proj"]),
    ("re:up", []), ("LM_HEAD", []), ("re:lm_hea", []),
    ("model.layers.[0-3].*", ["model.layers.1.mlp.up_proj"])])
def test_what_a_rule_matches(match, hits):
    names = ["lm_head", "model.layers.1.mlp.up_proj"]
    assert [name for name in names if Rule(match=match).matches(name)] == hits


@pytest.mark.parametrize("rule, said", [
    ({"match": "re:("}, "no regular expression"), ({"match": ""}, "at least 1"),
    ({"match": "re:(.*)*Z"}, "repeats so much"), ({"match": "re:" + ".?" * 100 + "Z"}, "so many choices"),
    ({"match": "re:a{99999999999999999999}"}, "no regular expression"),
    ({"match": "*", "options": {"a": 1}}, "takes no spec"), ({"match": "*", "format": "x"}, "takes no spec"),
    ({"match": "*", "method": "rtn"}, "needs a spec"), ({"match": "*", "optional": "yes"}, "boolean")])
def test_rules_that_contradict_themselves(rule, said):
    with pytest.raises(ValueError, match=said):
        Rule.model_validate(rule)


def test_shipped_files_say_what_they_hold_only():
    for path in data_dir("recipes").iterdir():
        data = YAML(typ="safe", pure=True).load(path)
        assert data.keys() <= {"name", "extends", "description", "calibration", "kv", "rules", "candidates",
                               "transforms"}
        assert Path(path).stem == data["name"]
