"""Task files: lm-eval's YAML for tasks over local JSONL files, read strictly.

What is here is the part of lm-eval's format that holds no code: no ``!function``, no ``include``, no
dataset that would be downloaded. A file that quantkit takes, lm-eval takes too (``--include_path``),
from the folder with the data.
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from quantkit.plugins.manager import current
from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.frozen import Frozen
from quantkit.support.paths import local_path
from quantkit.support.safe_yaml import read_yaml

FOLDER = "tasks"
"""Where tasks lie in a folder of evaluation suites."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")

MAX_EXPRESSION = 1000
"""Characters."""

OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]
METRICS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes"),
    "loglikelihood": ("acc", "perplexity"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",)}
"""What each kind of task can be scored by."""


def _expression(text: str) -> str:
    """A regular expression; how long it may search is limited where it does."""
    if len(text) > MAX_EXPRESSION:
        raise ValueError(f"a regular expression is longer than {MAX_EXPRESSION} characters")
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


class MetricEntry(Frozen):
    """One item of ``metric_list``; the switches are those of ``exact_match``."""

    metric: str
    aggregation: str | None = None
    higher_is_better: bool | None = None
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: tuple[str, ...] | None = Field(default=None, strict=False)

    @field_validator("regexes_to_ignore")
    @classmethod
    def _compile(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return value if value is None else tuple(map(_expression, value))


class FilterStep(Frozen):
    """One step from what a model wrote to what is compared."""

    function: Literal["regex", "take_first", "lowercase", "uppercase", "remove_whitespace"]
    regex_pattern: str | None = None
    group_select: int | None = None
    fallback: str | None = None

    @field_validator("regex_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        return value if value is None else _expression(value)

    @model_validator(mode="after")
    def _belongs(self) -> FilterStep:
        filter_keys = self.model_fields_set & {"regex_pattern", "group_select", "fallback"}
        if filter_keys and self.function != "regex":
            raise ValueError(f"{min(filter_keys)} belongs to function regex")
        return self


class Filter(Frozen):
    """A named pipeline of steps."""

    name: str
    filter: tuple[FilterStep, ...] = Field(min_length=1, strict=False)

    @field_validator("filter")
    @classmethod
    def _ends(cls, value: tuple[FilterStep, ...]) -> tuple[FilterStep, ...]:
        if value[-1].function != "take_first":
            raise ValueError("the last step must be take_first: it takes the answer out of a list")
        return value


class DataFiles(Frozen):
    """``dataset_kwargs``: split → the plain name of a JSONL file in the user's folder."""

    data_files: dict[str, str] = Field(min_length=1)

    @field_validator("data_files")
    @classmethod
    def _plain(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value.values():
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a plain file name: a task reads only from the folder "
                                 "that the user names")
        return value


class Examples(Frozen):
    """``fewshot_config``: which rows are shown before a question."""

    sampler: Literal["default", "first_n"] = "first_n"
    samples: tuple[dict[str, Any], ...] | None = Field(default=None, strict=False)


class Metadata(Frozen):
    """About the task.

    Attributes:
        about: one sentence for lists.
        rows: a description of a line of the data file.
        source: a place from which the data can be had.
        group_by: a field; examples come only from rows with the same value of it.
    """

    version: float | int = 1.0
    about: str = ""
    rows: str = ""
    source: str = ""
    group_by: str | None = None


class TaskFile(Frozen):
    """One task file; the keys are lm-eval's."""

    task: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    tag: str | list[str] | None = None
    dataset_path: Literal["json"]
    dataset_kwargs: DataFiles
    output_type: OutputType
    test_split: str
    fewshot_split: str | None = None
    num_fewshot: int = Field(default=0, ge=0, le=64)
    fewshot_config: Examples = Examples()
    description: str = ""
    doc_to_text: str
    doc_to_target: str | int
    doc_to_choice: str | list[str] | None = None
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    generation_kwargs: dict[str, Any] | None = None
    filter_list: tuple[Filter, ...] | None = Field(default=None, strict=False)
    metric_list: tuple[MetricEntry, ...] = Field(min_length=1, strict=False)
    metadata: Metadata = Metadata()

    @model_validator(mode="after")
    def _coherent(self) -> TaskFile:
        splits = self.dataset_kwargs.data_files
        for key, split in (("test_split", self.test_split), ("fewshot_split", self.fewshot_split)):
            if split is not None and split not in splits:
                raise ValueError(f"{key} {split!r} is not among data_files: {', '.join(splits)}")
        if (self.output_type == "multiple_choice") != (self.doc_to_choice is not None):
            raise ValueError("doc_to_choice belongs to output_type multiple_choice, and only to it")
        if self.generation_kwargs is not None and self.output_type != "generate_until":
            raise ValueError("generation_kwargs belongs to output_type generate_until")
        for entry in self.metric_list:
            if entry.metric not in (known := METRICS[self.output_type]):
                raise ValueError(f"metric {entry.metric!r}: {did_you_mean(entry.metric, known)}")
        examples = self.fewshot_split is not None or self.fewshot_config.samples is not None
        if self.num_fewshot and not examples:
            raise ValueError("num_fewshot needs fewshot_split, or fewshot_config.samples")
        if self.fewshot_split == self.test_split:
            raise ValueError("fewshot_split is test_split: examples would show answers that are asked for")
        return self


@dataclass(frozen=True)
class TaskInfo:
    """A task that can be named.

    Attributes:
        name: its name in ``--tasks``.
        about: a sentence about the task.
        kind: its ``output_type``, as lm-eval names it.
        metrics: the names of its scores.
        files: the data files that it needs.
        owner: the distribution that brings it.
        path: the place of its YAML.
    """

    name: str
    about: str
    kind: str
    metrics: tuple[str, ...]
    files: tuple[str, ...]
    owner: str
    path: Path


def list_tasks() -> list[TaskInfo]:
    """Every task that can be named, by name. Raises UsageError for a broken file or a name taken twice."""
    files = _files()
    return [_info(name, *_only(name, files)) for name in sorted({path.stem for _, path in files})]


def find_task(name: str) -> tuple[TaskFile, Path]:
    """A task by its name, or by the path of its file.

    Raises:
        UsageError: there is none, there are several, or its file is malformed.
    """
    if "/" in name or "\\" in name or name.endswith((".yaml", ".yml")):
        path = local_path(name) or Path(name)
        return read_task(path), path
    _, path, task = _only(name, _files())
    return task, path


def read_task(path: Path) -> TaskFile:
    """Read one file. Raises UsageError with the line of every fault."""
    return read_yaml(path, UsageError).build(TaskFile)


def _files() -> list[tuple[str, Path]]:
    """The owner and the file of every task that can be named."""
    return [(info.distribution, path) for info, path in current().files("eval_dirs", FOLDER)]


def _only(name: str, files: Sequence[tuple[str, Path]]) -> tuple[str, Path, TaskFile]:
    matches = [(owner, path) for owner, path in files if path.stem == name]
    if not matches:
        raise UsageError(f"no task is called {name!r}", why=did_you_mean(name, {p.stem for _, p in files}),
                         next="name one of these, or a YAML file: --tasks ./mine.yaml")
    if len(matches) > 1:
        raise UsageError(f"two tasks are called {name!r}",
                         why=" and ".join(f"{path} (of {owner})" for owner, path in matches),
                         next=f"name the file itself: --tasks {matches[0][1]}")
    owner, path = matches[0]
    task = read_task(path)
    if task.task != name:
        raise UsageError(f"{path} calls itself {task.task!r}", next=f"write 'task: {name}'",
                         why="a task in a folder of tasks is found by its file's name")
    return owner, path, task


def _info(name: str, owner: str, path: Path, task: TaskFile) -> TaskInfo:
    metrics = dict.fromkeys(entry.metric for entry in task.metric_list)
    files = dict.fromkeys(task.dataset_kwargs.data_files.values())
    return TaskInfo(name, task.metadata.about, task.output_type, tuple(metrics), tuple(files), owner, path)
