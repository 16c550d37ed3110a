"""Whether the arguments of calls fit their tools' schemas, in bounded time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MAX_SECONDS = 0.1
"""Of processor time for all calls of a message; usual ones take a hundredth of it. The number of rules that
are applied says too little: a single one may compare a large value with many others."""
_Check = Callable[[Any, Any, Any, Any], Any]


def fit(calls: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Whether the arguments of each call of a message fit the JSON schema beside them.

    Regular expressions (``pattern``, ``patternProperties``) and formats aren't checked: Python's matcher can
    take hours for an expression that a stranger wrote. What is checked only for keys that nothing else names
    (``unevaluatedProperties``) isn't checked either.

    Returns:
        Whether all fit; ``False`` also if a schema is malformed, or it takes more than :data:`MAX_SECONDS`.
    """
    from jsonschema import Draft202012Validator, ValidationError, validators
    from referencing import Registry

    def bounded(check: _Check) -> _Check:
        def run(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
            if time.thread_time() > until:
                raise _TimeUpError
            return check(validator, rule, instance, schema) or ()

        return run

    def additional(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
        return () if "patternProperties" in schema else known["additionalProperties"](
            validator, rule, instance, schema)

    def unique(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if rule and isinstance(instance, list) and len(
                {json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
            yield ValidationError("two items are the same")

    known = Draft202012Validator.VALIDATORS
    left_out = {"pattern", "patternProperties", "format", "unevaluatedItems", "unevaluatedProperties",
                "$dynamicRef"}
    checks = {name: check for name, check in known.items() if name not in left_out}
    checks |= {"additionalProperties": additional, "uniqueItems": unique}
    kind = validators.create({}, {name: bounded(check) for name, check in checks.items()},
                             type_checker=Draft202012Validator.TYPE_CHECKER)
    until = time.thread_time() + MAX_SECONDS
    try:
        for arguments, schema in calls:
            # a part with a $schema would be checked by other rules than these
            plain = json.loads(json.dumps(schema), object_hook=_without_identity)
            if time.thread_time() > until or not kind(plain, registry=Registry()).is_valid(arguments):
                return False  # the registry fetches nothing
        return True
    except Exception:  # of any of the library's rules, over a schema that is malformed
        return False


class _TimeUpError(Exception):
    pass


def _without_identity(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items()
            if not (key in ("$schema", "$id") and isinstance(value, str))}
