"""Every hook there is. A plugin implements the ones it needs with ``@quantkit.plugins.hooks.hookimpl``.

A ``register`` callback takes ``(name, target, **about)``; ``target`` is an object or a lazy
``"module:attr"``. Hooks discover and observe; none stands on the per-token path.

A plugin's module may say ``QUANTKIT_API = 1``, the version of the hooks and base types that it was written
for; without it, 1 is assumed. A quantkit that doesn't offer that version leaves the plugin out and says which
of the two must be upgraded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pluggy

API_VERSION = 1
"""Version of the hooks and of the base types of what they register."""
OLDEST_API_VERSION = 1
"""The oldest version whose plugins still work here."""

hookspec = pluggy.HookspecMarker("quantkit")
hookimpl = pluggy.HookimplMarker("quantkit")

Register = Callable[..., None]


@hookspec
def register_sources(register: Register) -> None:
    """Where models come from. Target: a ``quantkit.sources.base.SourceKind``."""


@hookspec
def register_architectures(register: Register) -> None:
    """Model families, named by ``model_type``. Target: a ``quantkit.models.architecture.Architecture``."""


@hookspec
def register_methods(register: Register) -> None:
    """Weight quantizers. Target: a ``quantkit.quantization.methods.base.Method``."""


@hookspec
def register_transforms(register: Register) -> None:
    """Changes that keep a model's function. Target: a ``quantkit.quantization.transforms.base.Transform``."""


@hookspec
def register_recoveries(register: Register) -> None:
    """Training of scales and norms. Target: a ``quantkit.quantization.recovery.Recovery``."""


@hookspec
def register_formats(register: Register) -> None:
    """Layouts of quantized weights. Target: a ``quantkit.formats.base.Format``."""


@hookspec
def register_kernels(register: Register) -> None:
    """Kernels behind ``quantkit.ops``. Target: a ``quantkit.ops.dispatch.LinearKernel``."""


@hookspec
def register_kv_policies(register: Register) -> None:
    """Which positions of the KV cache stay. Target: a subclass of ``quantkit.kv.base.KVPolicy``."""


@hookspec
def register_kv_codecs(register: Register) -> None:
    """How keys and values are stored. Target: a ``quantkit.kv.base.KVCodec``."""


@hookspec
def register_drafters(register: Register) -> None:
    """What drafts tokens for a model to confirm. Target: a subclass of
    ``quantkit.runtime.drafting.base.Drafter``."""


@hookspec
def register_metrics(register: Register) -> None:
    """What ``quantkit eval`` measures. Target: a ``quantkit.evaluation.metrics.Metric``."""


@hookspec
def register_reporters(register: Register) -> None:
    """How results are written. Target: a ``quantkit.evaluation.report.base.Reporter``."""


@hookspec
def register_commands(register: Register) -> None:
    """Subcommands. Target: a click command; ``help=`` is the line that ``quantkit --help`` shows."""


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
