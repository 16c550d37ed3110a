"""Where quantkit walks over everything of a kind, a plugin's broken thing costs a warning and no more."""

from __future__ import annotations

import warnings
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops.dispatch import KernelQuery, choose
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import PluginManager, current, registry
from quantkit.quantization.recipe import list_recipes, load_recipe
from quantkit.sources.base import SourceKind
from quantkit.sources.open import kind_of, open_source
from quantkit.support.errors import PluginError, QuantkitError, SourceError
from quantkit.testing import tiny_model

SPEC = QuantSpec(bits=8, granularity=Granularity(strategy="channel"), scale_dtype="float32")
QUERY = KernelQuery("linear", "cpu", None, torch.float32, 16, 64, "pack-quantized", SPEC, "decode")


@pytest.fixture
def add():
    """``add(register_kernels=…)``: a plugin with these hooks, in a manager that only this test sees."""
    current.cache_clear()

    def call(**hooks):
        current().add(SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()}), "stranger",
                      version="7")

    yield call
    current.cache_clear()


def kernel(**changed):
    return SimpleNamespace(**{"name": "mine", "order": -100, "reason_against": lambda query: "never",
                              "prepare": lambda weight: None, "run": lambda x, prepared: x, **changed})


def failing(*arguments):
    raise ValueError("odd")


def leaving():
    raise SystemExit(3)


@pytest.mark.parametrize(("changed", "says"), [
    ({"reason_against": failing}, "reason_against() failed: ValueError: odd"),
    ({"reason_against": lambda query: False}, "reason_against() returned a bool"),
    ({"order": None}, "has order None"), ({"name": "other"}, "has name 'other'")])
def test_a_broken_kernel_is_a_declined_one(add, changed, says):
    usual = choose(QUERY).kernel.name
    add(register_kernels=lambda register: register("mine", kernel(**changed)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = choose(QUERY), choose(QUERY)
    assert first.kernel.name == second.kernel.name == usual
    assert says in dict(second.declined)["mine"]
    assert len(caught) == 1 and says in str(caught[0].message) and "stranger 7" in str(caught[0].message)


def test_a_kernel_that_works_is_chosen(add):
    add(register_kernels=lambda register: register("mine", kernel(reason_against=lambda query: None)))
    assert choose(QUERY).kernel.name == "mine"


def test_a_builtin_kernel_that_raises_is_our_own_fault(monkeypatch):
    monkeypatch.setattr(type(registry("kernels").get("reference")), "reason_against", failing)
    with pytest.raises(ValueError, match="odd"):
        choose(QUERY)


def test_a_broken_format_is_left_out_of_doctor(add):
    from quantkit.cli.doctor import _kernel_cases

    usual = list(_kernel_cases())
    broken = type("Broken", (type(registry("formats").get("pack-quantized")),), {"reason_against": failing})
    add(register_formats=lambda register: register("mine", "qk_broken_format:FORMAT"))
    registry("formats")._loaded["mine"] = broken.__new__(broken)
    with pytest.warns(UserWarning, match="format 'mine' of stranger 7 .*fails in reason_against") as caught:
        assert list(_kernel_cases()) == usual
        assert list(_kernel_cases()) == usual
    assert len(caught) == 1


def test_what_could_be_used_instead_is_told_without_what_is_broken(add, tmp_path):
    from quantkit.quantization.planning.plan import make_plan

    add(register_methods=lambda register: register("mine", "no_such_module_at_all:METHOD"),
        register_formats=lambda register: register("mine", 5))
    folder = tiny_model(tmp_path / "tiny", tie_word_embeddings=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rules:\n  - match: '*embed_tokens'\n    method: gptq\n"
                      "    spec: {bits: 4, granularity: {strategy: channel}}\n"
                      "  - {match: '*', method: null}\n")
    with closing(open_source(str(folder))) as model, pytest.raises(QuantkitError) as caught, \
            pytest.warns(UserWarning, match="no_such_module_at_all"):
        make_plan(load_recipe(str(recipe)), model)
    assert "data-free method" in caught.value.why and "rtn" in caught.value.why


def source(**changed):
    return SourceKind(**{"matches": lambda uri: False, "open": failing, "example": "mine:NAME", "order": -100,
                         **changed})


@pytest.mark.parametrize(("changed", "says"), [
    ({"matches": failing}, "matches() failed: ValueError: odd"),
    ({"matches": lambda uri: "yes"}, "matches() returned a str, not a bool"),
    ({"order": "first"}, "has order 'first'"), ({"example": None}, "has example None")])
def test_a_broken_source_takes_nothing(add, tmp_path, changed, says):
    folder = tiny_model(tmp_path / "tiny")
    add(register_sources=lambda register: register("mine", source(**changed)))
    with pytest.warns(UserWarning) as caught:
        open_source(str(folder)).close()
        assert kind_of(str(folder)) == "local"
        with pytest.raises(SourceError, match="no model"):
            open_source("::nothing::")
    assert len(caught) == 1 and says in str(caught[0].message) and "stranger 7" in str(caught[0].message)


def test_a_source_that_opens_something_else_is_named(add):
    add(register_sources=lambda register: register(
        "mine", source(matches=lambda uri: uri == "mine:x", open=lambda uri, revision: None)))
    with pytest.raises(PluginError, match="source 'mine' of stranger 7 gave a NoneType, which") as caught:
        open_source("mine:x")
    assert "tensors" in caught.value.why


@pytest.mark.parametrize(("answer", "says"), [
    (failing, "ValueError: odd"), (leaving, "SystemExit: 3"),
    (lambda: "/tmp", "returned a str"), (lambda: None, "returned a NoneType"),
    (lambda: ["recipes"], "is not the absolute path of a folder"), (lambda: [3], "TypeError"),
    (lambda: ["/no/such/folder"], "is not the absolute path of a folder")])
@pytest.mark.parametrize("hook", ["recipe_dirs", "eval_dirs"])
def test_folders_that_are_none_cost_a_warning(add, hook, answer, says):
    usual = [path for _, path in PluginManager(only=()).folders(hook)]
    add(**{hook: lambda: answer()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert [path for _, path in current().folders(hook)] == usual
    assert len(caught) == 1 and says in str(caught[0].message) and "stranger 7" in str(caught[0].message)


def test_a_recipe_that_names_a_broken_plugin_is_listed_with_its_error(add, tmp_path):
    (tmp_path / "bad.yaml").write_text("name: bad\nkv: mine\nrules: [{match: '*', method: null}]\n")
    add(recipe_dirs=lambda: [tmp_path],
        register_kv_codecs=lambda register: register("mine", "no_such_module_at_all:Codec"))
    (info,) = [info for info in list_recipes() if info.name == "bad"]
    assert "'mine' of stranger 7" in info.error
    assert load_recipe("int8").name == "int8"


def test_a_recipe_with_a_shipped_name_is_left_out(add, tmp_path):
    (tmp_path / "int8.yaml").write_text("name: int8\nrules: [{match: '*', method: null}]\n")
    add(recipe_dirs=lambda: [tmp_path])
    with pytest.warns(UserWarning, match="int8.yaml of stranger is left out"):
        assert load_recipe("int8").rules[-1].method == "rtn"
