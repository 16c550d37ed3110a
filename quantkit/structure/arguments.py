"""Whether the arguments of a call fit a tool's schema, in bounded time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

MAX_CHECKS = 20_000
"""Rules of a schema that are applied to values, and values they are compared with."""
_Check = Callable[[Any, Any, Any, Any], Any]


def fit(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether arguments fit a JSON schema.

    Regular expressions (``pattern``, ``patternProperties``) and formats aren't checked: Python's matcher can
    take hours for an expression that a stranger wrote. What is checked only for keys that nothing else names
    (``unevaluatedProperties``) isn't checked either.

    Returns:
        Whether they fit; ``False`` also if the schema is malformed or takes more than :data:`MAX_CHECKS`.
    """
    from jsonschema import Draft202012Validator, ValidationError, validators
    from referencing import Registry

    spent = 0

    def bounded(check: _Check) -> _Check:
        def run(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
            nonlocal spent
            spent += 1 + sum(len(part) for part in (rule, instance) if isinstance(part, list | dict))
            if spent > MAX_CHECKS:
                raise _TooMuchError
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
    try:
        # a part with a $schema would be checked by other rules than these
        plain = json.loads(json.dumps(schema), object_hook=_without_identity)
        return bool(kind(plain, registry=Registry()).is_valid(arguments))  # a registry that fetches nothing
    except Exception:  # of any of the library's rules, over a schema that is malformed
        return False


class _TooMuchError(Exception):
    pass


def _without_identity(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items()
            if not (key in ("$schema", "$id") and isinstance(value, str))}
