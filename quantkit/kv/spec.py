"""The short way to write a KV setting: ``int8``, ``window(1024, sinks=4)+int8``, ``snapkv(0.5)``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from quantkit.plugins.manager import registry
from quantkit.plugins.registry import explain_absent
from quantkit.support.call_text import Options, named_options, read_call
from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.frozen import Frozen

MAX_LENGTH = 256
_PLUS = re.compile(r"\+(?![^()]*\))")  # not that of 1e+16 in parentheses
_SLASH = re.compile(r"/(?![^()]*\))")
_NEXT = 'quantkit generate MODEL PROMPT --kv "window(1024, sinks=4)+int8"'


class KVSpec(Frozen):
    """How keys and values are kept: which positions stay, and how each is stored.

    Attributes:
        policy: a registered policy; ``all`` keeps everything.
        options: the policy's own, checked when it is made.
        codec: a registered codec; ``none`` stores what the model computes, in its dtype.
        codec_options: the codec's own.
        values, value_options: of values, if they have a codec of their own.
    """

    policy: str = "all"
    options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    codec: str = "none"
    codec_options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    values: str | None = None
    value_options: dict[str, int | float | str | bool] = Field(default_factory=dict)

    def __str__(self) -> str:
        # the same setting is always written the same way, so that it can be read again and compared
        codec = _call(self.codec, self.codec_options, "bits")
        if self.values is not None:
            codec += "/" + _call(self.values, self.value_options, "bits")
        policy = _call(self.policy, self.options, "budget")
        parts = [text for text, default in ((policy, "all"), (codec, "none")) if text != default]
        return "+".join(parts) or "none"


def parse_kv(text: str) -> KVSpec:
    """A policy, a codec, or both joined by ``+``; ``none`` is neither; ``A/B`` stores keys as A, values as B.

    Arguments are ``name=value``; the first may be given without its name: a policy's ``budget``, a codec's
    ``bits``.

    Raises:
        UsageError: it can't be read, or names something that nobody registered.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"a KV setting of {len(text)} characters", why=f"{MAX_LENGTH} are allowed",
                         next=_NEXT)
    fields: dict[str, object] = {}
    for part in (_PLUS.split(text) if text.strip() != "none" else []):
        sides = [_read(side) for side in _SLASH.split(part)]
        first = sides[0]
        if len(sides) > 2 or (len(sides) == 2 and {side.kind for side in sides} != {"codec"}):
            raise UsageError(f"the KV setting {text!r} can't be read", next=_NEXT,
                             why=f"{part.strip()!r} is not a codec of keys, a slash and a codec of values")
        if first.kind in fields:
            raise UsageError(f"the KV setting {text!r} names two of a kind", next=_NEXT,
                             why=f"{fields[first.kind]!r} and {first.name!r} are both a {first.kind}")
        fields[first.kind] = first.name
        fields["options" if first.kind == "policy" else "codec_options"] = first.options
        if len(sides) == 2:
            fields |= {"values": sides[1].name, "value_options": sides[1].options}
    return KVSpec.model_validate(fields)


def setting_of(recipe: Mapping[str, Any]) -> KVSpec:
    """The setting that a recipe, as a manifest records it, saves for its checkpoint.

    Raises:
        UsageError: it names a policy or codec that isn't installed.
    """
    text = recipe.get("kv")
    return parse_kv(text) if isinstance(text, str) else KVSpec()


def split_settings(text: str) -> list[str]:
    """``none,int8,window(512, sinks=4)`` → its parts; commas in parentheses separate nothing."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


class _Call(NamedTuple):
    """A ``policy`` or ``codec``, with its options."""

    kind: str
    name: str
    options: Options


def _read(part: str) -> _Call:
    name, options = read_call(part, _NEXT)
    policies, codecs = registry("kv_policies"), registry("kv_codecs")
    kind = "policy" if name in policies else "codec"
    if kind == "codec" and name not in codecs:
        absent = explain_absent("KV policy", name) or explain_absent("KV codec", name)
        why, then = absent or (did_you_mean(name, [*policies, *codecs]), "quantkit plugins list")
        raise UsageError(f"no KV policy or codec is called {name!r}", why=why, next=then)
    return _Call(kind, name, named_options(options, "budget" if kind == "policy" else "bits", part, _NEXT))


def _call(name: str, options: dict[str, int | float | str | bool], first: str) -> str:
    """``name(first, other=value)``."""
    written = {option: str(value).lower() if isinstance(value, bool) else str(value)
               for option, value in sorted(options.items(), key=lambda item: (item[0] != first, item))}
    inner = ", ".join(value if option == first else f"{option}={value}" for option, value in written.items())
    return name + (f"({inner})" if inner else "")
