"""A KV setting → its policy and its codec."""

from __future__ import annotations

from pydantic import ValidationError

from quantkit.errors import UsageError, did_you_mean
from quantkit.kv.base import KVCodec, KVPolicy
from quantkit.plugins import registry
from quantkit.spec import KVSpec


def build_policy(spec: KVSpec) -> KVPolicy:
    """The policy with its options.

    Raises:
        UsageError: unknown, or an option is unknown, missing or out of range.
    """
    kind = registry("kv_policies").get(spec.policy)
    fields = kind.model_fields
    for name in spec.options:
        if name not in fields:
            raise UsageError(f"the KV policy {spec.policy!r} has no option {name!r}",
                             why=did_you_mean(name, fields))
    try:
        policy: KVPolicy = kind.model_validate(spec.options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its options"
        raise UsageError(f"the KV policy {spec.policy!r} can't be made", why=f"{where}: {first['msg']}",
                         next=f'write for instance --kv "{spec.policy}(512)"' if fields else None) from None
    return policy


def build_codec(spec: KVSpec) -> KVCodec:
    """The codec. Raises UsageError for an unknown one."""
    codec: KVCodec = registry("kv_codecs").get(spec.codec)
    return codec
