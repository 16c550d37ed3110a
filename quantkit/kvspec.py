"""The short way to write a KV setting: ``int8``, ``window(1024, sinks=4)+int8``, ``snapkv(0.5)``."""

from __future__ import annotations

import re

from quantkit.call_text import Options, named_options, read_call
from quantkit.errors import UsageError, did_you_mean
from quantkit.first_party import explain_absent
from quantkit.plugins import registry
from quantkit.spec import KVSpec

MAX_LENGTH = 256
_PLUS = re.compile(r"\+(?![^()]*\))")  # not that of 1e+16 in parentheses
_SLASH = re.compile(r"/(?![^()]*\))")
_NEXT = 'quantkit generate MODEL PROMPT --kv "window(1024, sinks=4)+int8"'


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
        kinds = {kind for kind, _, _ in sides}
        kind, name, options = sides[0]
        if len(sides) > 2 or (len(sides) == 2 and kinds != {"codec"}):
            raise UsageError(f"the KV setting {text!r} can't be read", next=_NEXT,
                             why=f"{part.strip()!r} is not a codec of keys, a slash and a codec of values")
        if kind in fields:
            raise UsageError(f"the KV setting {text!r} names two of a kind", next=_NEXT,
                             why=f"{fields[kind]!r} and {name!r} are both a {kind}")
        fields[kind] = name
        fields["options" if kind == "policy" else "codec_options"] = options
        if len(sides) == 2:
            _, fields["values"], fields["value_options"] = sides[1]
    return KVSpec.model_validate(fields)


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


def _read(part: str) -> tuple[str, str, Options]:
    """``policy`` or ``codec``, its name, its options."""
    name, options = read_call(part, _NEXT)
    policies, codecs = registry("kv_policies"), registry("kv_codecs")
    kind = "policy" if name in policies else "codec"
    if kind == "codec" and name not in codecs:
        absent = explain_absent("KV policy", name) or explain_absent("KV codec", name)
        why, then = absent or (did_you_mean(name, [*policies, *codecs]), "quantkit plugins list")
        raise UsageError(f"no KV policy or codec is called {name!r}", why=why, next=then)
    return kind, name, named_options(options, "budget" if kind == "policy" else "bits", part, _NEXT)
