"""Every hook there is. A plugin implements the ones it needs with ``@quantkit.plugins.hooks.hookimpl``.

A ``register`` callback takes ``(name, target, **about)``; ``target`` is an object or a lazy
``"module:attr"``. Hooks discover and observe; none stands on the per-token path.

A plugin's module may say ``QUANTKIT_API = 1``, the version of the hooks and base types that it was written
for; without it, 1 is assumed. A quantkit that doesn't offer that version leaves the plugin out and says which
of the two must be upgraded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pluggy

API_VERSION = 1
"""Version of the hooks and of the base types of what they register."""
OLDEST_API_VERSION = 1
"""The oldest version whose plugins still work here."""

hookspec = pluggy.HookspecMarker("quantkit")
hookimpl = pluggy.HookimplMarker("quantkit")

Register = Callable[..., None]


class RegistryKind(NamedTuple):
    """What one registry holds; the arguments of its :class:`~quantkit.plugins.registry.Registry`."""

    noun: str
    expects: str
    about: str
    rules: Mapping[str, bool] = {}
    beside: str = ""


_SUBCLASS, _NAMED = {"subclass": True}, {"named": True}
REGISTRIES = {
    "sources": RegistryKind("source", "quantkit.sources.base:SourceKind", "Where models come from."),
    "architectures": RegistryKind("architecture", "quantkit.models.architecture:Architecture",
                                  "Model families, named by ``model_type``."),
    "methods": RegistryKind("method", "quantkit.quantization.methods.base:Method", "Weight quantizers.",
                            _NAMED),
    "transforms": RegistryKind("transform", "quantkit.quantization.transforms.base:Transform",
                               "Changes that keep a model's function.", _NAMED),
    "recoveries": RegistryKind("recovery", "quantkit.quantization.recovery:Recovery",
                               "Training of scales and norms.", _NAMED),
    "formats": RegistryKind("format", "quantkit.formats.base:Format", "Layouts of quantized weights.",
                            _NAMED),
    "kernels": RegistryKind("kernel", "quantkit.ops.dispatch:LinearKernel",
                            "Kernels behind ``quantkit.ops``.", _NAMED),
    "kv_policies": RegistryKind("KV policy", "quantkit.kv.base:KVPolicy",
                                "Which positions of the KV cache stay.", _SUBCLASS),
    "kv_codecs": RegistryKind("KV codec", "quantkit.kv.base:KVCodec", "How keys and values are stored.",
                              _SUBCLASS, "kv_policies"),
    "drafters": RegistryKind("drafter", "quantkit.runtime.drafting.base:Drafter",
                             "What drafts tokens for a model to confirm.", _SUBCLASS),
    "metrics": RegistryKind("metric", "quantkit.evaluation.metrics:Metric",
                            "What ``quantkit eval`` measures."),
    "reporters": RegistryKind("reporter", "quantkit.evaluation.report.base:Reporter",
                              "How results are written."),
    "commands": RegistryKind("command", "click:Command",
                             "Subcommands; ``help=`` is the line that ``quantkit --help`` shows.")}
"""Every registry; the hook ``register_<key>`` fills it."""


def _register_hook(key: str, kind: RegistryKind) -> Callable[[Register], None]:
    def hook(register: Register) -> None: ...

    hook.__name__ = hook.__qualname__ = f"register_{key}"
    hook.__doc__ = f"{kind.about} Target: ``{kind.expects.replace(':', '.')}``."
    return hookspec(hook)


globals().update({f"register_{key}": _register_hook(key, kind) for key, kind in REGISTRIES.items()})


@hookspec
def recipe_dirs() -> list[Path]:
    """Folders that hold recipe YAML files."""


@hookspec
def eval_dirs() -> list[Path]:
    """Folders that hold evaluation suite YAML files."""


@hookspec
def on_layer_quantized(name: str, row: dict[str, Any]) -> None:
    """One weight is done; ``row`` is its row in the manifest."""


@hookspec
def on_run_finished(kind: str, summary: dict[str, Any]) -> None:
    """A ``quantize``, ``eval`` or ``eval-long`` run ended; ``summary`` is what ``--json`` prints."""
