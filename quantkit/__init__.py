"""quantkit: make an open-weights model smaller and faster, and measure what it cost.

    import quantkit

    quantkit.quantize("smollm2", "int4", "smollm2-int4")
    model = quantkit.load("smollm2-int4", kv="int8")
    print(model.generate([{"role": "user", "content": "Hello!"}]).text)

The names in ``__all__`` are stable: a change to one of them is announced in CHANGELOG.md a release before.
Everything else is private, but for what docs/plugins.md says of plugins. Importing quantkit imports none of
them, and so neither torch nor any other large package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quantkit.api.evaluate import compare as compare
    from quantkit.api.evaluate import evaluate as evaluate
    from quantkit.api.model import Model as Model
    from quantkit.api.model import load as load
    from quantkit.api.plan import plan as plan
    from quantkit.api.quantize import quantize as quantize
    from quantkit.api.serve import serve as serve
    from quantkit.checkpoint.reader import Checkpoint as Checkpoint
    from quantkit.kv.spec import KVSpec as KVSpec
    from quantkit.quantization.recipe import Recipe as Recipe
    from quantkit.runtime.engine import Engine as Engine
    from quantkit.support.errors import QuantkitError as QuantkitError

_MODULES = {"Checkpoint": "checkpoint.reader", "Engine": "runtime.engine", "KVSpec": "kv.spec",
            "Model": "api.model", "QuantkitError": "support.errors", "Recipe": "quantization.recipe",
            "compare": "api.evaluate", "evaluate": "api.evaluate", "load": "api.model", "plan": "api.plan",
            "quantize": "api.quantize", "serve": "api.serve"}
__all__ = [*sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"quantkit.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
