"""A KV setting → its policy and its codecs."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import TypeVar

from quantkit.kv.base import MAX_RESIDUAL, MAX_TOKENS, PAGE, KVCodec, KVCodecs, KVPolicy, SideCodec
from quantkit.kv.checked import check_policy_declarations
from quantkit.kv.policies.window import ModelWindow
from quantkit.kv.spec import KVSpec
from quantkit.models.config import ModelConfig
from quantkit.plugins.manager import describe_entry, registry
from quantkit.support.call_text import made_with
from quantkit.support.errors import PluginError, UsageError
from quantkit.support.units import bytes_of

Made = TypeVar("Made", KVCodec, KVPolicy)


def build_policy(spec: KVSpec, takes: Callable[[KVPolicy], int] | None = None) -> KVPolicy:
    """The policy with its options.

    Args:
        spec: policy and codec.
        takes: bytes of a sequence with a policy whose budget is tokens, which a budget in bytes becomes; by
            default it becomes some number of them.

    Raises:
        UsageError: unknown, or an option is unknown, missing or out of range; bytes are too few.
    """
    kind: type[KVPolicy] = registry("kv_policies").get(spec.policy)

    def built(options: Mapping[str, object]) -> KVPolicy:
        policy = _built(kind, KVPolicy, "policy", spec.policy, options, "512")
        check_policy_declarations(policy)
        return policy

    size = bytes_of(budget) if isinstance(budget := spec.options.get("budget"), str) else None
    if size is None:
        return built(spec.options)
    policy = built({**spec.options, "budget": 4 * PAGE})
    if takes is None:
        return policy
    count = bisect.bisect_left(range(1, MAX_TOKENS), True, key=lambda count: takes(
        policy.model_copy(update={"budget": count})) > size)
    if not count:
        least = takes(policy.model_copy(update={"budget": 1}))
        raise UsageError(f"a KV cache of {budget} is too small", next="a larger budget, or fewer bits",
                         why=f"with {policy.name!r} it has {least:,} bytes at least: pages of {PAGE} tokens "
                             "in each layer and head")
    return built({**spec.options, "budget": count})


def by_layer(policy: KVPolicy, config: ModelConfig, first: int = 0) -> list[KVPolicy]:
    """What decides, in each layer of a model, which positions stay.

    Where the model itself looks only at a window, a layer holds that window, and the policy is for the
    others; but if there are no others, a policy that ranks positions is for all.

    Args:
        first: slots that its codecs leave where they are (:attr:`quantkit.kv.base.KVCodecs.first`).
    """
    windows = [None if window is None or window >= config.max_position_embeddings else window
               for window in config.sliding_windows]
    if None not in windows and not policy.keeps_all and policy.visible is None:
        return [policy] * len(windows)
    model_windows = {window: ModelWindow(budget=window, first=first) for window in windows
                     if window is not None}
    sees = MAX_TOKENS if policy.visible is None else policy.visible[0]
    return [policy if window is None or sees <= window else model_windows[window] for window in windows]


def build_codec(name: str, options: Mapping[str, object]) -> KVCodec:
    """A codec with its options. Raises UsageError as :func:`build_policy`."""
    kind: type[KVCodec] = registry("kv_codecs").get(name)
    codec = _built(kind, KVCodec, "codec", name, options, "3")
    for field in ("residual_length", "sinks"):
        if not (type(value := getattr(codec, field)) is int and 0 <= value <= MAX_RESIDUAL):
            raise PluginError(f"{describe_entry('kv_codecs', name)}: {field} is {value!r}",
                              why="it is a number of tokens", next=f"quantkit plugins check {name}")
    return codec


def build_kv_codecs(spec: KVSpec) -> KVCodecs:
    """How both sides are stored. Raises UsageError as :func:`build_policy`."""
    keys = build_codec(spec.codec, spec.codec_options)
    values = keys if spec.values is None else build_codec(spec.values, spec.value_options)
    sides = keys.keys(), values.values()
    for codec, side in zip((spec.codec, spec.values or spec.codec), sides):
        if not isinstance(side, SideCodec):
            raise UsageError(f"the KV codec {codec!r} can't be used", why=f"{side!r} isn't a SideCodec",
                             next="see docs/plugins.md, and update the plugin")
    return KVCodecs(*sides, max(keys.residual_length, values.residual_length),
                    max(-(-codec.sinks // PAGE) * PAGE for codec in (keys, values)))


def check_kv(spec: KVSpec) -> None:
    """Raises UsageError: policy or codecs can't be made with these options."""
    build_policy(spec)
    build_kv_codecs(spec)


def _built(kind: type[Made], base: type[KVCodec] | type[KVPolicy], what: str, name: str,
           options: Mapping[str, object], example: str) -> Made:
    plural = {"policy": "policies", "codec": "codecs"}[what]
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UsageError(f"the KV {what} {name!r} can't be made",
                         why=f"what is registered as {name!r} isn't a {base.__name__}",
                         next="see docs/plugins.md, and update the plugin")
    if (called := getattr(kind, "name", None)) != name:
        raise PluginError(f"{describe_entry(f'kv_{plural}', name)} calls itself {called!r}",
                          why="a class has the name that it is registered by",
                          next=f'name: ClassVar[str] = "{name}" in {kind.__name__}')
    hint = f'write for instance --kv "{name}({example})"' if kind.model_fields else None
    return made_with(kind, options, f"KV {what} {name!r}", "docs/kv.md", hint)
