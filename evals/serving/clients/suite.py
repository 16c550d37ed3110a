"""What the suites of clients share: counting checks, and values that several of them send."""

from __future__ import annotations

import json
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = ("The harbour was quiet that morning.", "Seven copper lanterns hung in the street.")
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
                                            "days": {"type": "integer", "minimum": 1, "maximum": 9}},
           "required": ["city", "days"], "additionalProperties": False}
"""JSON schema of a tool's arguments. Its text is short, as a small model might not end one by itself."""
PLACE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
                                          "kind": {"type": "string", "enum": ["city", "village"]},
                                          "people": {"type": "integer", "minimum": 0, "maximum": 10**8}},
         "required": ["name", "kind", "people"], "additionalProperties": False}
"""JSON schema of an answer."""


class Suite:
    """Counts checks. Each is a block of assertions; one that fails doesn't stop the others."""

    def __init__(self, name: str) -> None:
        self._name, self._passed, self._failed = name, 0, 0

    @contextmanager
    def check(self, label: str) -> Iterator[None]:
        """One check. Whatever its block raises is its failure."""
        try:
            yield
        except Exception as error:
            self._failed += 1
            line = traceback.extract_tb(error.__traceback__)[1:2]
            where = f" (line {line[0].lineno}: {line[0].line})" if line else ""
            print(f"FAILED {label}: {type(error).__name__}: {str(error)[:400]}{where}", flush=True)
        else:
            self._passed += 1
            print(f"ok     {label}", flush=True)

    def finish(self) -> int:
        """Print the summary line. Returns the exit code."""
        print(f"{self._name}: {self._passed} passed, {self._failed} failed")
        return 1 if self._failed else 0


def server(doc: str | None) -> tuple[str, str]:
    """The URL, from the command line, and the name of the first model there; ``--help`` prints ``doc``."""
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        print(doc)
        raise SystemExit(0)
    url = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000").rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            return url, str(json.load(answer)["data"][0]["id"])
    except OSError as error:
        raise SystemExit(f"no server at {url}: {error}; start one with: quantkit serve-local MODEL") from None


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether an object has a schema's keys with values that they may have; for the schemas above."""
    if not isinstance(value, dict) or set(value) != set(schema["properties"]):
        return False
    for name, rule in schema["properties"].items():
        kind = {"string": str, "integer": int, "number": (int, float)}[rule["type"]]
        if not isinstance(value[name], kind) or value[name] not in rule.get("enum", [value[name]]):
            return False
        if kind is str and len(value[name]) > rule.get("maxLength", 10**9):
            return False
        if kind is int and not rule.get("minimum", -10**9) <= value[name] <= rule.get("maximum", 10**9):
            return False
    return True
