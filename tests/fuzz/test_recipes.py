"""What people type and write: recipes, KV settings, budgets, sizes, patterns of layers' names."""

from __future__ import annotations

import copy

import pytest

from quantkit.kv.build import build_kv_codecs, build_policy
from quantkit.kv.spec import parse_kv
from quantkit.quantization.budget.amount import parse_budget, parse_bytes
from quantkit.quantization.planning.plan import candidate_rows, make_plan
from quantkit.quantization.recipe import list_recipes, load_recipe
from quantkit.quantization.transforms.base import with_own_head
from quantkit.sources.open import open_source
from quantkit.support.errors import UsageError
from quantkit.support.patterns import compiled
from quantkit.support.safe_yaml import read_yaml
from quantkit.testing import tiny_model

KV = ["int8", "none", "window(1024, sinks=4)+int8", "snapkv(0.5)", "bf16/int4", "h2o(256)+rotation(3)",
      "expected(1GB)+int2/int4", "pyramidkv(budget=128)", "kvzip(0.3)", "adakv(512)+fp8"]
SIZES = ["4.25bpw", "5GB", "16GiB", "110MB", "0.5TB"]
ODD = [*"()+,/= .-0123456789ebpwGMB", "int4", "nan", "1e999", "9" * 30, "true", "\ud800", "\0", "٣", "²"]
PATTERNS = ["re:.*layers\\.(0|1)\\..*", "a{2,3}b?", "(?:x|yz)w?", "\\d+\\.q_proj$", "[^a-z]*(?=k)"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(str(tiny_model(
        tmp_path_factory.mktemp("model") / "tiny", tie_word_embeddings=False, num_key_value_heads=4,
        hidden_size=128, intermediate_size=256)))


@pytest.fixture
def parse_recipe(source, tmp_path):
    def parse(data: bytes) -> None:
        (tmp_path / "r.yaml").write_bytes(data)
        recipe = load_recipe(str(tmp_path / "r.yaml"))
        if recipe.candidates:
            candidate_rows(recipe, source)
        else:
            make_plan(recipe, with_own_head(recipe, source))

    return parse


def recipes():
    """Those that fit the model: its embedding isn't its head."""
    return [info for info in list_recipes() if info.name != "mlx-4bit-tied"]


def test_the_text_of_a_recipe(parse_recipe, fuzz, mutations):
    fuzz(parse_recipe, [info.path.read_bytes() for info in recipes()], mutations["bytes"])


def test_the_values_of_a_recipe(parse_recipe, fuzz, mutations):
    """JSON is YAML too."""
    seeds = [copy.deepcopy(read_yaml(info.path).data) for info in recipes()]
    for seed, info in zip(seeds, recipes(), strict=True):
        seed.setdefault("name", info.name)
    fuzz(lambda value: parse_recipe(mutations["encode"](value)), seeds, mutations["json"])


def edited(text, chance):
    """``text`` with one to three of its characters replaced, removed, inserted or repeated."""
    for _ in range(chance.randint(1, 3)):
        at, character = chance.randrange(len(text) + 1), chance.choice(ODD)
        end = at + chance.choice([0, 1, 1, 3])
        text = text[:at] + character * chance.choice([0, 1, 1, 1, 400]) + text[end:]
    return text


def test_kv_settings(fuzz):
    def parse(text):
        spec = parse_kv(text)
        build_policy(spec)
        build_kv_codecs(spec)
        assert parse_kv(str(spec)) == spec

    fuzz(parse, KV, edited)


def test_budgets_and_sizes(fuzz):
    def parse(text):
        if text.endswith("bpw"):
            parse_budget(text).linear_bytes(10**9, 10**6)
            return
        parse_budget(text)
        parse_bytes(text, "--memory")

    fuzz(parse, SIZES, edited)


def test_patterns(fuzz):
    def parse(text):
        try:
            pattern = compiled(text)
        except ValueError as error:  # whoever asks says where it stands
            raise UsageError(str(error), next="another pattern") from None
        pattern.match("model.layers.0.self_attn.q_proj")

    fuzz(parse, PATTERNS, edited)
