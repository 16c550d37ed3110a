"""Checks everything that an installed plugin registers: ``quantkit plugins check``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from quantkit.plugins.manager import PluginInfo, PluginManager
from quantkit.plugins.registry import RegistryEntry, described, load_target
from quantkit.support.errors import PluginError, QuantkitError, RecipeError, UsageError, did_you_mean

CHECKS = {kind: f"quantkit.testing:check_{name}" for kind, name in (
    ("methods", "method"), ("transforms", "transform"), ("formats", "format"), ("kernels", "kernel"),
    ("kv_policies", "policy"), ("kv_codecs", "codec"), ("drafters", "drafter"),
    ("metrics", "metric"), ("reporters", "reporter"), ("sources", "source"),
    ("architectures", "architecture"))}
"""Registry → the kit's function for what is in it."""
Status = Literal["ok", "failed", "not checked"]


@dataclass(frozen=True)
class CheckResult:
    """What became of one check.

    Attributes:
        kind: ``method``, ``KV policy``, ``recipe``, …; ``plugin`` for the plugin itself.
        name: as registered.
        status: ``not checked`` where the check needs something that isn't known.
        why: what failed, or what isn't known.
        next: what to do about it.
    """

    kind: str
    name: str
    status: Status
    why: str | None = None
    next: str | None = None


class _NotChecked(Exception):
    """The check needs something that isn't known; the message says what."""


def find_plugins(manager: PluginManager, name: str) -> list[PluginInfo]:
    """The plugins whose entry point or distribution is called ``name``. Raises UsageError without any."""
    plugins = [plugin for plugin in manager.plugins if name in (plugin.distribution, plugin.name)]
    if not plugins:
        known = {known for plugin in manager.plugins for known in (plugin.distribution, plugin.name)}
        raise UsageError(f"no plugin is called {name!r}", why=did_you_mean(name, known),
                         next="quantkit plugins list")
    return plugins


def check_all(manager: PluginManager, name: str) -> Iterator[CheckResult]:
    """Put everything that a plugin registers to the kit's checks, one after the other.

    Args:
        manager: where it is loaded.
        name: of its entry point or distribution.

    Raises:
        UsageError: there is no such plugin.
    """
    for plugin in find_plugins(manager, name):
        unused = _unused(manager, plugin)
        yield from unused
        if plugin.error is not None:
            yield CheckResult("plugin", plugin.name, "failed", f"it was left out: {plugin.error}")
        elif not unused and next(_checks_of(manager, plugin.distribution), None) is None:
            yield CheckResult("plugin", plugin.name, "not checked", "it registers nothing")
    for owner in dict.fromkeys(plugin.distribution for plugin in find_plugins(manager, name)):
        for kind, thing, check in _checks_of(manager, owner):
            yield _checked(kind, thing, check)


def _unused(manager: PluginManager, plugin: PluginInfo) -> list[CheckResult]:
    """What a plugin registers and nobody can use, as its name is somebody else's, too."""
    disputes = [dispute for table in manager.registries.values()
                for dispute in table.disputes(plugin.name, plugin.distribution)]
    remedies = dict.fromkeys(plugin.refused, "register it under another name")
    remedies |= {dispute.what: dispute.next or "" for dispute in disputes}
    return [CheckResult("plugin", plugin.name, "failed", f"not all of it can be used: {what}", remedy)
            for what, remedy in remedies.items()]


def _checks_of(manager: PluginManager, owner: str) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Kind, name and check of everything that a distribution registers."""
    for registry, table in manager.registries.items():
        for name in list(table):
            if (entry := table.entry(name)).owner == owner:
                yield table.kind, name, partial(_check_entry, manager, registry, entry)
    for hook, kind, check in (("recipe_dirs", "recipe", _check_recipe), ("eval_dirs", "suite", _check_suite)):
        for folder in (folder for folder_owner, folder in manager.dirs(hook) if folder_owner == owner):
            for path in sorted(folder.glob("*.yaml")):
                yield kind, path.stem, partial(check, manager, path)


def _checked(kind: str, name: str, check: Callable[[], None]) -> CheckResult:
    try:
        check()
    except _NotChecked as reason:
        return CheckResult(kind, name, "not checked", str(reason))
    except QuantkitError as error:
        why = "; ".join(map(str, filter(None, (error.what, error.why))))
        return CheckResult(kind, name, "failed", why, error.next)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a stranger's code may raise SystemExit, too; the other checks go on
        return CheckResult(kind, name, "failed", f"its code raised {described(error)}")
    return CheckResult(kind, name, "ok")


def _check_entry(manager: PluginManager, kind: str, entry: RegistryEntry) -> None:
    thing = manager.registries[kind].get(entry.name)
    if kind == "commands":
        _check_command(thing)
        return
    try:
        check = load_target(CHECKS[kind], f"the check of {kind}")
    except (KeyError, PluginError):
        singular = manager.registries[kind].kind
        raise _NotChecked(f"this version of quantkit has no check for a {singular}") from None
    if kind == "sources":
        with tempfile.TemporaryDirectory() as folder:
            check(thing, uri=_check_uri(entry, Path(folder)))
    elif kind == "architectures":
        check(thing, config=_check_config(entry))
    elif kind in ("kv_policies", "kv_codecs", "drafters"):
        if (called := getattr(thing, "name", None)) != entry.name:
            raise PluginError(f"{thing.__name__} calls itself {called!r}",
                              why="a class has the name that it is registered by",
                              next=f'name: ClassVar[str] = "{entry.name}"')
        check(thing, **entry.about.get("check_options", {}))
    else:
        check(thing)


def _check_uri(entry: RegistryEntry, folder: Path) -> str:
    """``check_uri=`` of the registration: a function that makes a model in an empty folder → its uri."""
    if (target := entry.about.get("check_uri")) is None:
        raise _NotChecked('it names no model: register(…, check_uri="module:function"), where the function '
                          "makes a model in an empty folder and returns its uri")
    uri = load_target(target, f"check_uri of source {entry.name!r}")(folder)
    if not isinstance(uri, str):
        raise PluginError(f"check_uri of source {entry.name!r} returned {uri!r:.80}", why="it must be a uri")
    return uri


def _check_config(entry: RegistryEntry) -> Mapping[str, Any]:
    """``check_config=`` of the registration: a tiny ``config.json``; families of the kit have theirs."""
    from quantkit.testing.examples import family_config
    from quantkit.testing.tiny import FAMILIES

    if (target := entry.about.get("check_config")) is not None:
        config: Mapping[str, Any] = load_target(target, f"check_config of architecture {entry.name!r}")
        return config
    if entry.name in FAMILIES:
        return family_config(entry.name)
    raise _NotChecked('it names no config: register(…, check_config="module:CONFIG"), a tiny model\'s '
                      "config.json as a dictionary")


def _check_command(command: Any) -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(command, ["--help"])
    if result.exit_code != 0:
        raise PluginError(f"--help exits with {result.exit_code}",
                          why=described(result.exception) if result.exception else result.output)


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
            if (reason := method.refuses(rule.spec)) is not None:
                raise RecipeError(f"{path}: {rule.method} can't produce {rule.spec.label()}", why=reason)
            manager.registries["formats"].get(rule.format_name)
    for transform in recipe.transforms:
        manager.registries["transforms"].get(transform.name).options(**transform.options)
    if recipe.recover is not None:
        manager.registries["recoveries"].get(recipe.recover.name).options(**recipe.recover.options)


def _check_suite(manager: PluginManager, path: Path) -> None:
    """It can be read."""
    from quantkit.evaluation.suite import EvalSuite
    from quantkit.support.safe_yaml import read_yaml

    suite = read_yaml(path, UsageError).build(EvalSuite)
    if suite.name != path.stem:
        raise UsageError(f"{path} calls itself {suite.name!r}", why="it is found by its file's name")
