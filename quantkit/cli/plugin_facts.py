"""What every plugin registers, as plain data. Imports no target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.plugins.code import module_file
from quantkit.plugins.manager import KINDS, PluginInfo, PluginManager, current, named_files
from quantkit.plugins.registry import RegistryEntry

SUITES = "evaluation suites"
_FILES = {"recipes": "recipe_dirs", SUITES: "eval_dirs"}


def plugin_facts() -> dict[str, Any]:
    """Plain data of every plugin and everything it registers.

    Returns:
        ``plugins``: name, distribution, version, module, file, api, error, refused (why something of it isn't
        used), observes (hooks). ``registered``: by kind, entries of kind, name, owner, distribution (the
        same), plugin, version, target, module, file, about. ``recipes`` and ``suites``: kind, name, owner,
        distribution, plugin, version, file.
    """
    manager = current()
    files = {kind: _named(manager, kind) for kind in _FILES}
    return {
        "plugins": [_plugin(manager, info) for info in manager.plugins],
        "registered": {kind: [_registration(manager, kind, entry) for info in manager.plugins
                              for entry in table.entries(info.name, info.distribution)]
                       for kind, table in manager.registries.items()},
        "recipes": files["recipes"], "suites": files[SUITES],
    }


def contents(facts: dict[str, Any], plugin: dict[str, Any]) -> dict[str, list[str]]:
    """What one plugin brings, as names by kind; kinds of which it has none are left out."""
    groups = {**facts["registered"], "recipes": facts["recipes"], SUITES: facts["suites"]}
    names = {kind: [entry["name"] for entry in entries
                    if (entry["plugin"], entry["owner"]) == (plugin["name"], plugin["distribution"])]
             for kind, entries in groups.items()}
    return {kind: known for kind, known in {**names, "observes": plugin["observes"]}.items() if known}


def _plugin(manager: PluginManager, info: PluginInfo) -> dict[str, Any]:
    contested = [dispute.what for table in manager.registries.values()
                 for dispute in table.disputes(info.name, info.distribution)]
    refused = list(dict.fromkeys([*info.refused, *contested]))
    return {"name": info.name, "distribution": info.distribution, "version": info.version,
            "module": info.module, "file": info.file, "api": info.api, "error": info.error,
            "refused": refused, "observes": manager.observed(info)}


def _registration(manager: PluginManager, kind: str, entry: RegistryEntry) -> dict[str, Any]:
    target = entry.target
    module = target.partition(":")[0] if isinstance(target, str) else getattr(
        target, "__module__", type(target).__module__)
    return {"kind": KINDS[kind].singular, "name": entry.name, "owner": entry.owner,
            "distribution": entry.owner, "plugin": entry.plugin, "version": entry.version,
            "target": target if isinstance(target, str) else repr(target),
            "module": module, "file": module_file(str(module)),
            "about": {key: str(value) for key, value in entry.about.items()}}


def _named(manager: PluginManager, kind: str) -> list[dict[str, Any]]:
    """Recipes or suites, told apart by the folder in which each is."""
    owners: dict[Path, PluginInfo] = {}
    for info, folder in manager.folders(_FILES[kind]):
        owners.setdefault(folder, info)
    files = named_files([(info.distribution, folder) for folder, info in owners.items()])
    return [{"kind": kind.removesuffix("s"), "name": path.stem, "owner": owner,
             "distribution": owner, "plugin": owners[path.parent].name,
             "version": owners[path.parent].version, "file": str(path)}
            for owner, path in files]
