"""The documentation says what the code does: hooks, commands, recipes, options, targets and examples."""

import importlib.util
import inspect
import json
import re
import tomllib
import types
from pathlib import Path

import pytest

from quantkit import __version__
from quantkit.evaluation.metrics import Metric
from quantkit.evaluation.suite import EvalSuite
from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.kv.base import KVCodec, KVPolicy, PolicyView, SideCodec
from quantkit.kv.policies.score_policy import ScorePolicy
from quantkit.models.architecture import Architecture
from quantkit.plugins import hooks
from quantkit.plugins.manager import PluginManager, registry
from quantkit.quantization.methods.base import LayerStats, Method
from quantkit.quantization.methods.grid import Grid
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import list_recipes, load_recipe
from quantkit.sources.open import open_source
from quantkit.support.errors import DONE, FAILED, INTERRUPTED, RESUMABLE, USAGE
from quantkit.testing import tiny_model
from quantkit.testing.scaffold import KINDS, render

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
HOOKS = {name: hook for name, hook in inspect.getmembers(hooks, inspect.isfunction)
         if hasattr(hook, "quantkit_spec")}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(name), re.MULTILINE | re.DOTALL)


def module_of(name: str) -> types.ModuleType:
    """A script of the documentation."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_every_hook_is_described_with_its_arguments(hook):
    arguments = ", ".join(inspect.signature(HOOKS[hook]).parameters)
    assert f"`{hook}({arguments})`" in text_of("docs/plugin-reference.md")


def test_no_hook_is_described_that_does_not_exist():
    hooks_part = text_of("docs/plugin-reference.md").split("## Names")[0]
    described = set(re.findall(r"^\| `(\w+)\(", hooks_part, re.MULTILINE))
    assert described == set(HOOKS)


@pytest.mark.parametrize("command", sorted(registry("commands")))
def test_every_command_is_described(command):
    assert f"\n## quantkit {command}\n" in text_of("docs/cli.md")


def test_the_command_page_is_what_the_commands_say():
    assert module_of("generate_cli").render() == text_of("docs/cli.md"), "run: python docs/generate_cli.py"


def test_every_recipe_is_described_and_no_other():
    described = set(re.findall(r"^\| `([\w-]+)` \|", text_of("docs/recipes.md").split("## Writing")[0],
                               re.MULTILINE))
    assert described == {info.name for info in list_recipes()}


@pytest.mark.parametrize("kind", ["methods", "transforms"])
def test_every_method_and_transform_and_its_options_are_described(kind):
    page = text_of("docs/recipes.md")
    for name in registry(kind):
        thing = registry(kind).get(name)
        assert f"| `{name}` |" in page and thing.paper in page
        for option in thing.options.model_fields:
            assert f"`{option}`" in page, f"option {option} of {name}"


def test_every_kv_policy_and_codec_is_described_with_its_options():
    page = text_of("docs/kv.md")
    for name in registry("kv_codecs"):
        assert f"\n| `{name}` |" in page
    for name in registry("kv_policies"):
        row = next(line for line in page.splitlines() if re.match(rf"\| `{name}[`(]", line))
        for option in registry("kv_policies").get(name).model_fields:
            assert option == "budget" or option in row, f"option {option} of {name}"


def test_the_recipe_of_the_page_is_a_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text(blocks("docs/recipes.md", "yaml")[0], encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert len(recipe.rules) == 5
    for rule in recipe.rules:
        if rule.method:
            method = registry("methods").get(rule.method)
            assert method.reason_against(rule.spec) is None
            method.options(**rule.options)
    plan = make_plan(recipe, open_source(str(tiny_model(tmp_path / "model"))))
    assert {row.method for row in plan.rows} == {"rtn", "gptq", None}


def test_the_examples_of_plugins_are_what_plugins_new_makes():
    files = render("method", "clipped").files
    examples = re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)^```", text_of("docs/plugins.md"),
                          re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    for path, content in examples:
        assert content == files[path], path


def test_the_other_examples_of_plugins_work(tmp_path):
    """Each is registered, loads as the reference says, and has the type that its registry expects."""
    examples = blocks("docs/plugin-reference.md", "python")
    names = {"ARCHITECTURE": "architectures", "KIND": "sources", "TRANSFORM": "transforms",
             "KERNEL": "kernels", "Repeat": "drafters", "REPORTER": "reporters", "command": "commands"}
    assert len(examples) == len(names)
    tables = PluginManager(only=()).registries
    for code, (target, kind) in zip(examples, names.items()):
        exec(compile(code, "docs/plugin-reference.md", "exec"), made := {})
        name = getattr(made[target], "name", "mine")
        tables[kind].register(name, made[target], owner="dist-mine")
        assert tables[kind].get(name) is made[target]


AUTHORS_MEET = (
    Method, LayerStats, Codes, Grid, Format, QuantizedTensor, PolicyView, KVPolicy, ScorePolicy, KVCodec,
    SideCodec, Metric, Architecture, EvalSuite)
NOT_FOR_AUTHORS = {"model_config", "where", "null", "wrong", "rows", "Phase"}
"""What pydantic has, and details that the docstrings are enough for."""


def attributes(thing: type) -> set[str]:
    """What a class itself defines for others: fields, methods and annotated attributes."""
    fields = set(getattr(thing, "__dataclass_fields__", {})) | set(vars(thing).get("__annotations__", {}))
    methods = {name for name, value in vars(thing).items()
               if inspect.isfunction(value) or isinstance(value, property)}
    return {name for name in fields | methods if not name.startswith("_")} - NOT_FOR_AUTHORS


@pytest.mark.parametrize("thing", AUTHORS_MEET)
def test_everything_that_an_author_meets_is_described(thing):
    page = re.sub(r"```.*?^```", "", text_of("docs/plugin-reference.md"), flags=re.MULTILINE | re.DOTALL)
    assert thing.__name__ in page
    missing = {name for name in attributes(thing) if not re.search(rf"`(\w+\.)*{name}[`(]", page)}
    assert not missing, missing


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_kind_that_has_a_template_has_a_check(kind):
    assert f"`check_{kind}(" in text_of("docs/plugin-reference.md")
    assert f"`{kind}`" in text_of("docs/plugins.md")


def test_the_observer_of_the_page_observes(tmp_path, monkeypatch):
    observer_code = blocks("docs/plugins.md", "python")[-1]
    plugin = types.ModuleType("observer")
    exec(compile(observer_code, "docs/plugins.md", "exec"), vars(plugin))
    monkeypatch.chdir(tmp_path)
    manager = PluginManager(only=[])
    manager.add(plugin, "quantkit-observer")
    manager.notify("on_run_finished", kind="eval", summary={"results": []})
    assert json.loads((tmp_path / "runs.jsonl").read_text()) == {"kind": "eval", "summary": {"results": []}}


def named_targets(page: str) -> set[str]:
    """Targets in code: between backticks, or on an indented line."""
    return set(re.findall(r"(?:`|^    )make ([a-z-]+)", text_of(page), re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_named_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert named_targets(page) and named_targets(page) <= targets


def test_the_readme_names_what_ci_runs():
    ran = re.findall(r"^make ([a-z-]+)$", text_of(".ci/run"), re.MULTILINE)
    assert ran == ["lint", "test", "aot"]
    assert set(ran) <= named_targets("README.md") and set(ran) <= named_targets("CONTRIBUTING.md")


def test_exit_codes_are_described():
    rows = dict(re.findall(r"^\| (\d+) \| (\w+)", text_of("docs/errors.md"), re.MULTILINE))
    assert rows == {str(DONE): "done", str(FAILED): "failed", str(USAGE): "usage", str(RESUMABLE): "stopped",
                    str(INTERRUPTED): "interrupted"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md",
                                  *(str(p.relative_to(ROOT)) for p in sorted(DOCS.rglob("*.md")))])
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", text_of(page)):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def headings(page: Path) -> set[str]:
    """The names that links give a page's headings, made as GitHub makes them; code blocks have none."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_linked_headings_exist():
    links = [(page, (page.parent / target) if target else page, heading)
             for page in [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
             for target, heading in re.findall(r"\]\(((?:[\w./-]+\.md)?)#([^)\s]+)\)",
                                               page.read_text(encoding="utf-8"))]
    assert len(links) > 50
    lost = [f"{page.name}: {target.name}#{heading}" for page, target, heading in links
            if heading not in headings(target)]
    assert lost == []


def test_the_changelog_has_this_version():
    assert re.search(rf"^## {re.escape(__version__)}\b", text_of("CHANGELOG.md"), re.MULTILINE)


def test_versions_are_constrained_and_users_are_not_pinned():
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {re.match(r"[\w.-]+", line).group().lower().replace("_", "-") for line in
             [*project["dependencies"], *extras]} - {"quantkit"}
    pinned = {line.split("==")[0].lower().replace("_", "-"): line for line in
              text_of("constraints.txt").splitlines() if "==" in line and not line.startswith("#")}
    assert names <= set(pinned), names - set(pinned)
    assert "+" not in pinned["torch"], "a local version would shut the CUDA build out"
    assert not [line for line in project["dependencies"] if "==" in line.split(";")[0]]


def test_the_calibration_of_the_page_is_one_and_every_key_is_there(tmp_path):
    (block,) = blocks("docs/calibration.md", "yaml")
    rule = "rules:\n  - {match: '*', method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}\n"
    (tmp_path / "mine.yaml").write_text(block + rule, encoding="utf-8")
    spec = load_recipe(str(tmp_path / "mine.yaml")).calibration
    assert spec.texts == ("manuals/", "chats.jsonl")
    assert spec.model_fields_set == set(type(spec).model_fields)
