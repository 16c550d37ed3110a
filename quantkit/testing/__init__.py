"""For plugin authors: tiny models, and a check for each of the six common kinds of thing that a plugin
registers.

A check puts what it is given to the work that quantkit would give it, ordinary and awkward, and raises
PluginError where a promise of its base type is broken. It can be called in a test of any framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.testing.architectures import check_architecture
    from quantkit.testing.formats import FORMAT_SPECS, check_format
    from quantkit.testing.kv import check_codec, check_policy, policy_view
    from quantkit.testing.methods import METHOD_SPECS, check_method
    from quantkit.testing.metrics import check_metric
    from quantkit.testing.results import sample_results
    from quantkit.testing.tiny import (
        CHAT_TEMPLATE,
        FAMILIES,
        VOCAB,
        tiny_config,
        tiny_model,
        tiny_tokenizer,
        tiny_weights,
    )

_MODULES = {
    "architectures": ("check_architecture",),
    "formats": ("FORMAT_SPECS", "check_format"),
    "kv": ("check_codec", "check_policy", "policy_view"),
    "methods": ("METHOD_SPECS", "check_method"),
    "metrics": ("check_metric",),
    "results": ("sample_results",),
    "tiny": ("CHAT_TEMPLATE", "FAMILIES", "VOCAB", "tiny_config", "tiny_model", "tiny_tokenizer",
             "tiny_weights"),
}

__all__ = ["CHAT_TEMPLATE", "FAMILIES", "FORMAT_SPECS", "METHOD_SPECS", "VOCAB", "check_architecture",
           "check_codec", "check_format", "check_method", "check_metric", "check_policy", "policy_view",
           "sample_results", "tiny_config", "tiny_model", "tiny_tokenizer", "tiny_weights"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: ``quantkit plugins`` makes a plugin without torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"quantkit.testing.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
