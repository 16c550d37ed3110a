"""Checks everything that an installed plugin registers: ``quantkit plugins check``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import quantkit.testing
from quantkit.plugins.manager import PluginInfo, PluginManager
from quantkit.plugins.registry import FAILURES, RegistryEntry, described, load_target
from quantkit.support.errors import PluginError, QuantkitError, RecipeError, UsageError, did_you_mean

CHECKS = {"methods": "check_method", "formats": "check_format", "kv_policies": "check_policy",
          "kv_codecs": "check_codec", "metrics": "check_metric", "architectures": "check_architecture"}
"""Registry → the kit's function for what is in it."""
Status = Literal["ok", "failed", "not checked"]


@dataclass(frozen=True)
class CheckResult:
    """What became of one check.

    Attributes:
        kind: ``method``, ``KV policy``, ``recipe``, …; ``plugin`` for the plugin itself.
        name: the registered name.
        status: ``not checked`` where the kit has no check or the check needs something that isn't known.
        why: the promise that was broken, or what isn't known.
        next: the remedy that is suggested.
    """

    kind: str
    name: str
    status: Status
    why: str | None = None
    next: str | None = None


class _NotChecked(Exception):
    """Nothing is checked; the message says why."""


def check_all(manager: PluginManager, name: str) -> Iterator[CheckResult]:
    """Put everything that a plugin registers to the kit's checks, one after the other.

    Args:
        manager: the manager that has loaded it.
        name: the name of its entry point or distribution.

    Raises:
        UsageError: there is no such plugin.
    """
    plugins = [info for info in manager.plugins if name in (info.distribution, info.name)]
    if not plugins:
        known = {known for info in manager.plugins for known in (info.distribution, info.name)}
        raise UsageError(f"no plugin is called {name!r}", why=did_you_mean(name, known),
                         next="quantkit plugins list")
    for info in plugins:
        if info.error is not None:
            yield CheckResult("plugin", info.name, "failed", f"it was left out: {info.error}")
            continue
        collisions = manager.collisions(info)
        for collision in collisions:
            yield CheckResult("plugin", info.name, "failed", f"not all of it can be used: {collision.what}",
                              collision.next)
        checks = list(_checks_of(manager, info))
        for kind, name_of_thing, check in checks:
            yield _checked(kind, name_of_thing, check)
        if not checks and not collisions:
            yield CheckResult("plugin", info.name, "not checked", "it registers nothing")


def _checks_of(manager: PluginManager, info: PluginInfo) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Kind, name and check of everything that a plugin registers."""
    for registry, table in manager.registries.items():
        for entry in table.entries(info.name, info.distribution):
            if entry.name in list(table):
                yield table.kind, entry.name, partial(_check_entry, manager, registry, entry)
    for owner, path in manager.files("recipe_dirs"):
        if owner is info:
            yield "recipe", path.stem, partial(_check_recipe, manager, path)
    for owner, path in manager.files("eval_dirs"):
        if owner is info:
            yield "suite", path.stem, partial(_check_suite, path)


def _checked(kind: str, name: str, check: Callable[[], None]) -> CheckResult:
    try:
        check()
    except _NotChecked as reason:
        return CheckResult(kind, name, "not checked", str(reason))
    except QuantkitError as error:
        why = "; ".join(map(str, filter(None, (error.what, error.why))))
        return CheckResult(kind, name, "failed", why, error.next)
    except FAILURES as error:  # plugin code may raise anything; the other checks go on
        return CheckResult(kind, name, "failed", f"its code raised {described(error)}")
    return CheckResult(kind, name, "ok")


def _check_entry(manager: PluginManager, registry: str, entry: RegistryEntry) -> None:
    thing = manager.registries[registry].get(entry.name)
    if registry not in CHECKS:
        raise _NotChecked(f"it can be loaded; quantkit.testing has no check for a {entry.kind}")
    check = getattr(quantkit.testing, CHECKS[registry])
    if registry.startswith("kv_"):
        if (called := getattr(thing, "name", None)) != entry.name:
            raise PluginError(f"{thing.__name__} calls itself {called!r}",
                              why="a class has the name that it is registered by",
                              next=f'name: ClassVar[str] = "{entry.name}"')
        check(thing, **entry.about.get("check_options", {}))
    elif registry == "architectures":
        target = entry.about.get("check_config")
        if target is None and entry.name not in quantkit.testing.FAMILIES:
            raise _NotChecked('it names no config: register(…, check_config="module:CONFIG"), the '
                              "config.json of a tiny model as a dictionary")
        check(thing, load_target(target, f"check_config of architecture {entry.name!r}"))
    else:
        check(thing)


def _check_recipe(manager: PluginManager, path: Path) -> None:
    """It can be read, and its methods take its specs and options."""
    from quantkit.quantization.recipe import load_recipe

    recipe = load_recipe(str(path))
    if recipe.name != path.stem:
        raise RecipeError(f"{path} calls itself {recipe.name!r}", why="it is found by its file's name")
    for rule in (*recipe.rules, *recipe.candidates):
        if rule.method and rule.spec and rule.format_name:
            method = manager.registries["methods"].get(rule.method)
            method.options(**rule.options)
            if (reason := method.reason_against(rule.spec)) is not None:
                raise RecipeError(f"{path}: {rule.method} can't produce {rule.spec.label()}", why=reason)
            manager.registries["formats"].get(rule.format_name)
    for transform in recipe.transforms:
        manager.registries["transforms"].get(transform.name).options(**transform.options)
    if recipe.recover is not None:
        manager.registries["recoveries"].get(recipe.recover.name).options(**recipe.recover.options)


def _check_suite(path: Path) -> None:
    from quantkit.evaluation.suite import EvalSuite
    from quantkit.support.safe_yaml import read_yaml

    suite = read_yaml(path, UsageError).build(EvalSuite)
    if suite.name != path.stem:
        raise UsageError(f"{path} calls itself {suite.name!r}", why="it is found by its file's name")
