"""A 6-bit KV codec as a quantkit plugin. This file only says where it is."""

from __future__ import annotations

from quantkit.plugins.hooks import Register, hookimpl

QUANTKIT_API = 1


@hookimpl
def register_kv_codecs(register: Register) -> None:
    register("int6", "quantkit_int6kv.codec:Int6Codec")
