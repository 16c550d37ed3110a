"""Runs lm-eval's tasks: its prompts, its filters and its scoring, over local files and our runtime.

Nothing is downloaded and nothing is written: rows are read from the user's folder and handed to
lm-eval in memory. https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.evaluation.tasks.data import RenderedRows, Row, load_prompts
from quantkit.evaluation.tasks.file import FilterStep, TaskFile, TaskInfo, find_task, list_tasks
from quantkit.evaluation.tasks.lm_eval_model import INSTALL, lm_eval_model
from quantkit.evaluation.tasks.sandbox import regex_filter, remove_all
from quantkit.evaluation.tasks.score import TaskScore, item_values, score
from quantkit.evaluation.tasks.scoring import BATCH
from quantkit.kv.spec import KVSpec
from quantkit.models.config import ModelConfig
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.progress import Listener, silent

SEED = 1234
"""Chooses the examples where the sampler is ``default``; lm-eval's own."""
_EVAL, _EXAMPLES = "eval", "examples"


@dataclass(frozen=True)
class ReadyTask:
    """A task whose data is there.

    Attributes:
        file: its file's content.
        parts: lm-eval's ``ConfigurableTask`` objects, one for every group of rows.
        items: rows in all.
    """

    file: TaskFile
    parts: tuple[Any, ...]
    items: int

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what is asked: every prompt with its choices or settings, and the right answers. Results
        can be compared item by item if their tasks' fingerprints are the same."""
        digest = hashlib.sha256(self.file.output_type.encode())
        for part in self.parts:
            for row, instances in _by_row(part):
                asked = [[instance.args for instance in instances], row.get("choices"), row["text"],
                         row["target"]]
                digest.update(json.dumps(asked, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()


def prepare_tasks(names: Sequence[str], *, data: Path | None = None,
                  limit: int | None = None) -> list[ReadyTask]:
    """Find tasks, read their data and make lm-eval's objects of them; needs no model.

    Args:
        names: the names of tasks, or paths of their files.
        data: the folder with their data files; by default what ``QUANTKIT_TASK_DATA`` names.
        limit: items a task; ``None``: all.

    Raises:
        UsageError: a task is unknown, given twice or malformed, or its data is missing or doesn't fit.
        QuantkitError: lm-eval is not installed.
    """
    tasks = [find_task(name) for name in names]
    titles = [task.task for task, _ in tasks]
    if twice := {title for title in titles if titles.count(title) > 1}:
        raise UsageError(f"task {min(twice)} is given twice", next="name each task once")
    prompts = [load_prompts(task, str(path), data, limit) for task, path in tasks]
    with _quiet():
        return [ReadyTask(task, tuple(_make(task, part) for part in parts), sum(len(p.rows) for p in parts))
                for (task, _), parts in zip(tasks, prompts, strict=True)]


def run_tasks(loaded: LoadedModel, names: Sequence[str] | Sequence[ReadyTask], *, data: Path | None = None,
              limit: int | None = None, kv: KVSpec | None = None, batch: int = BATCH,
              progress: Listener = silent) -> list[TaskScore]:
    """Ask a model every item of every task.

    Args:
        loaded: the model in memory.
        names: the names of tasks, or what :func:`prepare_tasks` made of them.
        data, limit: as there.
        kv: how keys and values are kept; by default as the model's checkpoint says.
        batch: requests side by side, at most.
        progress: told how many of a task's requests are done.

    Returns:
        A score for every metric (and filter) of every task.

    Raises:
        UsageError: as :func:`prepare_tasks`; a prompt that this model's tokenizer can't score; or a task asks
            what greedy decoding writes, and the model writes blocks.
        QuantkitError: lm-eval is not installed, or the model's output is not finite.
    """
    ready = [task for task in names if isinstance(task, ReadyTask)]
    ready += prepare_tasks([task for task in names if isinstance(task, str)], data=data, limit=limit)
    check_tasks_of_blocks(loaded.config, loaded.uri, ready)
    model = lm_eval_model(loaded, kv=kv, batch=batch, progress=progress)
    results = []
    for task in ready:
        model.label = f"{task.file.task}, {loaded.label} kv {model.kv}".removesuffix(" kv none")
        results += _run(task, model)
    return results


def check_tasks_of_blocks(config: ModelConfig, name: str, tasks: Sequence[ReadyTask]) -> None:
    """Raises UsageError: a model writes blocks, and a task asks what greedy decoding would write."""
    greedy = next((task.file.task for task in tasks if task.file.output_type == "loglikelihood"), None)
    if config.diffusion is not None and greedy is not None:
        raise UsageError(f"{name} writes blocks, and can't be asked {greedy}",
                         why="whether it would write the answer isn't in its likelihood",
                         next="leave this task out")


def _make(task: TaskFile, prompts: RenderedRows) -> Any:
    try:
        from lm_eval.api.task import ConfigurableTask
    except ImportError as error:
        raise QuantkitError("tasks need lm-eval, which is not installed", why=str(error),
                            next=INSTALL) from None
    splits = {_EVAL: _Rows(prompts.rows), _EXAMPLES: _Rows(prompts.examples)}
    config: dict[str, Any] = {
        # the templates are filled in already: what is left names the fields that hold their results
        "task": task.task, "output_type": task.output_type, "custom_dataset": _giver(splits),
        "test_split": _EVAL, "doc_to_text": "text", "doc_to_target": "target",
        "description": "{{description}}", "num_fewshot": task.num_fewshot,
        "target_delimiter": task.target_delimiter, "fewshot_delimiter": task.fewshot_delimiter,
        "metric_list": [metric.model_dump(exclude_unset=True, exclude={"regexes_to_ignore"})
                        for metric in task.metric_list]}
    if task.doc_to_choice is not None:
        config["doc_to_choice"] = "choices"
    if task.num_fewshot:
        config |= {"fewshot_split": _EXAMPLES, "fewshot_config": {"sampler": task.fewshot_config.sampler}}
    if task.generation_kwargs is not None:
        config["generation_kwargs"] = dict(task.generation_kwargs)
    if task.filter_list is not None:
        config["filter_list"] = [{"name": filter_config.name,
                                  "filter": [_step(step) for step in filter_config.filter]}
                                 for filter_config in task.filter_list]
    harness_task = ConfigurableTask(config=config)
    harness_task.set_fewshot_seed(SEED)
    harness_task.build_all_requests()
    return harness_task


def _step(step: FilterStep) -> dict[str, Any]:
    options = step.model_dump(exclude_none=True)
    return options | {"function": regex_filter()} if step.function == "regex" else options


class _Rows(list[Row]):
    """Rows as lm-eval reads a split: a sequence that knows its fields."""

    @property
    def features(self) -> dict[str, None]:
        """The fields' names are what is asked for."""
        return dict.fromkeys(self[0]) if self else {}


def _giver(splits: dict[str, _Rows]) -> Callable[..., dict[str, _Rows]]:
    def give(**options: Any) -> dict[str, _Rows]:
        return splits

    return give


def _run(task: ReadyTask, model: Any) -> list[TaskScore]:
    instances = [instance for part in task.parts for instance in part.instances]
    for instance in instances:  # of an earlier run with another model
        instance.resps, instance.filtered_resps = [], {}
    answers = getattr(model, instances[0].request_type)(instances)
    for instance, answer in zip(instances, answers, strict=True):
        instance.resps.append(answer)
    values: dict[tuple[str, str], list[Any]] = {}
    choices: dict[tuple[str, str], list[int]] = {}
    for part in task.parts:
        with _quiet():
            part.apply_filters()
        for row, instances in _by_row(part):
            for name in instances[0].filtered_resps:
                row, results = _ignoring(task.file, row,
                                         [instance.filtered_resps[name] for instance in instances])
                for metric, value in part.process_results(row, results).items():
                    values.setdefault((metric, name), []).append(value)
                    if task.file.output_type == "multiple_choice":
                        choices.setdefault((metric, name), []).append(chosen(metric, row["choices"], results))
    filters = {name for _, name in values}
    return [TaskScore(task.file.task, metric if len(filters) == 1 else f"{metric},{name}",
                      score(metric, scores), task.items, item_values(metric, scores),
                      tuple(choices[metric, name]) if (metric, name) in choices else None)
            for (metric, name), scores in values.items()]


def _ignoring(task: TaskFile, row: Row, results: list[Any]) -> tuple[Row, list[Any]]:
    """A row and its answers without what ``regexes_to_ignore`` match; lm-eval's own search has no bound."""
    ignored = [pattern for entry in task.metric_list for pattern in entry.regexes_to_ignore or ()]
    if not ignored or task.output_type != "generate_until":
        return row, results
    return row | {"target": remove_all(ignored, str(row["target"]))}, [
        remove_all(ignored, answer) if isinstance(answer, str) else answer for answer in results]


def _by_row(part: Any) -> Iterator[tuple[Row, list[Any]]]:
    """Every row with its requests, in their order."""
    requests: dict[int, list[Any]] = {}
    for instance in part.instances:
        requests.setdefault(instance.doc_id, []).append(instance)
    for number, row in part.doc_iterator():
        yield row, sorted(requests[number], key=lambda instance: instance.idx)


def chosen(metric: str, choices: Sequence[str], results: Sequence[tuple[float, bool]]) -> int:
    """The option that a metric takes: the likeliest, by log-likelihood a character or byte if it says so."""
    sizes = {"acc_norm": [len(choice) for choice in choices],
             "acc_bytes": [len(choice.encode()) for choice in choices]}.get(metric, [1] * len(choices))
    return int(np.argmax(np.asarray([logprob for logprob, _ in results]) / np.asarray(sizes, dtype=float)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's bars and advice away from people: what concerns them is checked before."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


__all__ = ["ReadyTask", "TaskInfo", "TaskScore", "list_tasks", "prepare_tasks", "run_tasks"]
