"""What the plugins in ``plugins/`` of the repository register, so that a name of theirs can be explained
where the plugin isn't installed."""

from __future__ import annotations

import importlib.metadata

NAMES: dict[str, dict[str, str]] = {
    "recipe": {"int4-hqq": "quantkit-hqq", "int4-imatrix": "quantkit-imatrix",
               "trellis2-distill": "quantkit-recover"},
    "method": {"hqq": "quantkit-hqq", "imatrix": "quantkit-imatrix"},
    "recovery": {"distill": "quantkit-recover"},
    "KV policy": {"keydiff": "quantkit-keydiff"},
    "KV codec": {"int6": "quantkit-int6kv"},
    "metric": {"ece": "quantkit-ece"},
    "reporter": {"csv": "quantkit-csv"},
}
"""Kind, as messages say it → name → the distribution that registers it."""


def explain_absent(kind: str, name: str) -> tuple[str, str] | None:
    """Why a name isn't registered and what to do about it.

    Args:
        kind: as messages say it: ``"KV codec"``.
        name: that nobody registered.

    Returns:
        the cause and the next command; ``None`` if no plugin of the repository has such a name.
    """
    distribution = NAMES.get(kind, {}).get(name)
    if distribution is None:
        return None
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return (f"it belongs to the plugin {distribution}, which isn't installed",
                f"pip install plugins/{distribution}")
    return (f"it belongs to the plugin {distribution}, which is installed but not loaded",
            f"add {distribution.removeprefix('quantkit-')} to QUANTKIT_PLUGINS, or see what is wrong: "
            "quantkit plugins list")
