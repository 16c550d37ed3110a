"""KeyDiff as a quantkit plugin. This file only says where it is."""

from __future__ import annotations

from quantkit.plugins.hooks import Register, hookimpl

QUANTKIT_API = 1


@hookimpl
def register_kv_policies(register: Register) -> None:
    register("keydiff", "quantkit_keydiff.policy:KeyDiff")
