"""A name means one thing in the whole tree, and it is the field's name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = [path for folder in ("quantkit", "kernels", "plugins", "evals")
        for path in sorted((ROOT / folder).rglob("*.py"))]
# names that other projects don't know, and what they became
RENAMED = {
    "FusedModel": "CpuModel", "StepProgram": "CpuProgram", "Ticket": "Request", "_Flight": "_PendingStep",
    "Drawn": "PendingTokens", "_flies": "_can_run_ahead", "_arrive": "_collect", "Piece": "Chunk",
    "Room": "PageReservation", "Held": "PolicyView", "HeldSequence": "SequenceState",
    "HeldLayer": "LayerState", "Asked": "QueryWindow", "Coding": "SideCodec", "Codings": "KVCodecs",
    "Joint": "FusedLinear", "Placed": "DeviceWeight", "Packed": "CpuWeight",
    "piece_kernel": "split_kv_kernel", "join_kernel": "reduce_kernel", "Seam": "ScaleGroup",
    "Hay": "Haystack", "Bale": "HaystackTokens", "absorb": "accumulate", "absorbed": "accumulated",
    "listens": "tracks_queries"}
MOVED = ("runtime/fused.py", "runtime/step.py", "runtime/buffers.py", "runtime/arguments.py",
         "runtime/pieces.py", "runtime/memory.py", "runtime/sequence.py", "kv/room.py", "kv/held.py",
         "kv/asked.py", "kv/watch.py", "kv/read.py", "kv/predict.py", "models/seams.py",
         "evaluate/long/hay.py", "evaluate/long/paired.py", "capacity", "rows.py", "peak.py", "plan.py")


def identifiers(path: Path) -> Iterator[tuple[str, int]]:
    """Every name that a file defines or uses."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("name", "id", "attr", "arg", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                yield value, getattr(node, "lineno", 0)


def test_no_public_class_name_is_used_twice():
    places = defaultdict(list)
    for path in CODE:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 300, "the classes were not found"
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_old_names_are_gone():
    old = [f"{path.relative_to(ROOT)}:{line}: {name} is {RENAMED[name]}"
           for path in CODE for name, line in identifiers(path) if name in RENAMED]
    assert not old


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


@pytest.mark.parametrize("place", MOVED)
def test_old_places_are_gone(place):
    assert not (ROOT / "quantkit" / place).exists()
    mentions = [str(page.relative_to(ROOT)) for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
                if re.search(rf"(?<![\w/]){re.escape(place)}(?!\w)", page.read_text(encoding="utf-8"))
                and place.count("/")]
    assert not mentions
