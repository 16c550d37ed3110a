"""Reads the rows of a task's data files and builds their prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.evaluation.tasks.file import TaskFile
from quantkit.evaluation.tasks.sandbox import TaskTemplate
from quantkit.support.errors import UsageError
from quantkit.support.strict_json import holds_lone_surrogate

VARIABLE = "QUANTKIT_TASK_DATA"
MAX_BYTES = 256 * 2**20

Row = dict[str, Any]


@dataclass(frozen=True)
class RenderedRows:
    """What lm-eval is given: rows whose fields are already what its templates would have made.

    Attributes:
        group: the value of ``group_by`` that all rows share; ``""`` without it.
        rows: to be answered: ``text``, ``target``, ``description``, and ``choices`` if there are any.
        examples: shown before them.
    """

    group: str
    rows: tuple[Row, ...]
    examples: tuple[Row, ...]


def load_prompts(task: TaskFile, label: str, data: Path | None, limit: int
                 | None = None) -> list[RenderedRows]:
    """Read a task's data and fill in its templates.

    Args:
        task: the task's file, read.
        label: how messages name its file.
        data: the folder with its data files; by default what ``QUANTKIT_TASK_DATA`` names.
        limit: rows at most: the first ones, or with ``group_by`` the first of every group in turn.

    Returns:
        One item; with ``group_by`` one a group, in the order in which groups appear.

    Raises:
        UsageError: a file is missing or malformed, or a row doesn't fit the task.
    """
    files = task.dataset_kwargs.data_files
    rows = _read(files[task.test_split], task, label, data)
    shots = [] if task.fewshot_split is None else _read(files[task.fewshot_split], task, label, data)
    if task.fewshot_split is None and task.fewshot_config.samples:
        shots = [(f"{label}, fewshot_config.samples[{i}]", dict(row))
                 for i, row in enumerate(task.fewshot_config.samples)]
    field, render = task.metadata.group_by, _Renderer(task, label)
    groups = _grouped(rows, field)
    examples = _grouped(shots, field) if field else {}
    taken = _first(groups, limit)
    items = []
    for group, documents in taken.items():
        shots_of_group = examples.get(group, []) if field else shots
        if len(shots_of_group) < task.num_fewshot:
            raise UsageError(f"task {task.task} shows {task.num_fewshot} examples"
                             + (f" of {field} {group!r}" if field else ""),
                             why=f"there are {len(shots_of_group)}",
                             next=f"set num_fewshot in {label}, or add rows")
        items.append(RenderedRows(group, tuple(render(row, at) for at, row in documents),
                                  tuple(render(row, at) for at, row in shots_of_group)
                                  if task.num_fewshot else ()))
    return items


def data_folder(data: Path | None) -> Path | None:
    """The folder that the user gave, or the environment names."""
    value = os.environ.get(VARIABLE)
    return data if data is not None else Path(value).expanduser() if value else None


def _read(name: str, task: TaskFile, label: str, data: Path | None) -> list[tuple[str, Row]]:
    """``(where, row)`` of every line."""
    folder = data_folder(data)
    about = task.metadata
    looks = f"a line each: {about.rows}" if about.rows else "a JSON object a line"
    then = f"--task-data DIR, or {VARIABLE}=DIR, names the folder that holds it" + (
        f"; it can be had from {about.source}" if about.source else "")
    if folder is None:
        raise UsageError(f"task {task.task} needs the file {name}", why=looks, next=then)
    path = folder / name
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"task {task.task} needs the file {path}: {error.strerror or error}", why=looks,
                         next=then) from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB", next="give a part of it")
    rows = list(_lines(raw, path, looks))
    if not rows:
        raise UsageError(f"{path} is empty", why=looks, next=then)
    return rows


def _lines(raw: bytes, path: Path, looks: str) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
            row = json.loads(text)
            if holds_lone_surrogate(text, row):
                raise ValueError("it holds half of a surrogate pair")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} line {number} is not JSON", why=str(error)[:200], next=looks) from None
        if not isinstance(row, dict):
            raise UsageError(f"{path} line {number} is not a JSON object", next=looks)
        yield f"{path.name} line {number}", row


def _grouped(rows: Sequence[tuple[str, Row]], field: str | None) -> dict[str, list[tuple[str, Row]]]:
    groups: dict[str, list[tuple[str, Row]]] = {}
    for at, row in rows:
        if field is not None and field not in row:
            raise UsageError(f"{at} has no {field!r}", why="the task groups its rows by it",
                             next="add it to the row, or take group_by out of the task file")
        groups.setdefault("" if field is None else str(row[field]), []).append((at, row))
    return groups


def _first(groups: Mapping[str, list[tuple[str, Row]]],
           limit: int | None) -> dict[str, list[tuple[str, Row]]]:
    """The first rows, taken as evenly as possible from all groups."""
    total = sum(map(len, groups.values()))
    remaining = total if limit is None else min(limit, total)
    counts = dict.fromkeys(groups, 0)
    while remaining:
        for group, rows in groups.items():
            if remaining and counts[group] < len(rows):
                counts[group] += 1
                remaining -= 1
    return {group: rows[:counts[group]] for group, rows in groups.items() if counts[group]}


class _Renderer:
    """Fills a task's templates in from a row."""

    def __init__(self, task: TaskFile, label: str) -> None:
        def template(key: str, value: str) -> TaskTemplate:
            return TaskTemplate(value, f"{label}: {key}")

        self._label = label
        self._description = template("description", task.description)
        self._text = template("doc_to_text", task.doc_to_text)
        self._target = task.doc_to_target if isinstance(task.doc_to_target, int) else template(
            "doc_to_target", task.doc_to_target)
        self._choices = task.doc_to_choice if isinstance(task.doc_to_choice, list) else (
            None if task.doc_to_choice is None else template("doc_to_choice", task.doc_to_choice))

    def __call__(self, row: Row, at: str) -> Row:
        """Raises UsageError: the row doesn't fit."""
        text = self._text.value(row, at)
        target = self._target if isinstance(self._target, int) else self._target.value(row, at)
        rendered: Row = {"description": str(self._description.value(row, at))}
        if self._choices is None:
            return rendered | {"text": str(text), "target": str(target)}
        choices = self._choices.items(row, at) if isinstance(self._choices, TaskTemplate) else self._choices
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise self._misfit(at, "doc_to_choice", f"gives {choices!r:.200}, not a list of texts")
        text, target = _index(text), _index(target)
        if isinstance(text, int):  # a context a choice, and one continuation for all: text is the answer
            answer, key = text, "doc_to_text"
            target = str(target)
        else:
            text, key = str(text), "doc_to_target"
            answer = choices.index(target) if target in choices else target
            target = answer
        if not isinstance(answer, int) or not 0 <= answer < len(choices):
            raise self._misfit(at, key, f"gives {answer!r:.200}, which is none of {len(choices)} choices")
        return rendered | {"text": text, "target": target, "choices": list(choices)}

    def _misfit(self, at: str, key: str, why: str) -> UsageError:
        return UsageError(f"{at} doesn't fit the task", why=f"{key} {why[:300]}",
                          next=f"the templates are in {self._label}")


def _index(value: Any) -> Any:
    """A number written as text is a choice's number, as for lm-eval."""
    return int(value) if isinstance(value, bool) or (
        isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10) else value
