"""A name means one thing in the whole tree, and it is the field's name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = [path for folder in ("quantkit", "kernels", "plugins", "evals")
        for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_public_class_name_is_used_twice():
    places = defaultdict(list)
    for path in CODE:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 300, "the classes were not found"
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_locals_and_parameters_are_nouns_of_the_field():
    """``linear``, ``result`` or ``limit`` says what a thing is; these words don't."""
    vague = {"one", "found", "held", "most", "own", "whole", "said"}
    places = []
    for path in CODE:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                for node in ast.walk(function):
                    stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                    name = node.id if stored else node.arg if isinstance(node, ast.arg) else None
                    if name in vague:
                        places.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not places
