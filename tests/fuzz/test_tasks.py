"""Task files and their rows, mutated: prompts come of them, and scores of answers, or an error."""

from __future__ import annotations

import io
import json

import pytest
from ruamel.yaml import YAML

from quantkit.evaluation.tasks.data import load_prompts
from quantkit.evaluation.tasks.file import TaskFile
from quantkit.support.errors import UsageError
from quantkit.support.safe_yaml import parse_yaml

BASE = {"task": "t", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "a.jsonl"}},
        "test_split": "test", "metadata": {"version": 1.0, "group_by": "kind"}}
CHOICE = {**BASE, "output_type": "multiple_choice", "doc_to_text": "{{question}}\nAnswer:",
          "doc_to_target": "label", "metric_list": [{"metric": "acc"}],
          "doc_to_choice": "{{[a, b] | map('regex_replace', 'x+', '') | list}}",
          "num_fewshot": 1, "fewshot_config": {"samples": [
              {"question": "q", "a": "1", "b": "2", "label": 0, "kind": "k"}]}}
WRITTEN = {**BASE, "output_type": "generate_until", "doc_to_text": "question", "doc_to_target": "{{a}}",
           "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
           "filter_list": [{"name": "f", "filter": [
               {"function": "regex", "regex_pattern": "(\\d+)", "group_select": -1},
               {"function": "take_first"}]}],
           "metric_list": [
               {"metric": "exact_match", "regexes_to_ignore": [","], "ignore_case": True}]}
ROWS = [{"question": "q?", "a": "xone", "b": "two", "label": 1, "kind": "k"},
        {"question": "é", "a": "1", "b": "2", "label": 0, "kind": "k"}]
HOSTILE = ("(a+)+$", "(", "a{99999999999}", "{{ 1|round(10000000, 'ceil') }}",
           "{{ question|regex_replace('(a+)+$', '') }}",
           "{{ question * 9 }}", "[1, [2]]", "{% for x in range(9999) %}{{ question }}{% endfor %}")


@pytest.fixture
def use(tmp_path):
    def use(value):
        rows, out = value["rows"], io.StringIO()
        YAML(typ="safe", pure=True).dump(value["task"], out)
        written = out.getvalue().encode("utf-8", "surrogatepass")
        task = parse_yaml(written, "t.yaml", UsageError).build(TaskFile)
        lines = map(json.dumps, rows if isinstance(rows, list) else [rows])
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        prompts = load_prompts(task, "t.yaml", tmp_path)
        tasks = pytest.importorskip("quantkit.evaluation.tasks.run")
        pytest.importorskip("lm_eval")
        for part in prompts:
            made = tasks._make(task, part)
            if task.output_type != "generate_until":
                continue
            for one in made.instances:
                one.resps.append("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa! 12, 3")
            made.apply_filters()
            for row, own in tasks._by_row(made):
                for name in own[0].filtered_resps:
                    answers = [one.filtered_resps[name] for one in own]
                    made.process_results(*tasks._ignoring(task, row, answers))
    return use


def test_tasks(fuzz, mutations, use):
    def mutate(value, chance):
        name = chance.choice(["task", "task", "rows"])
        value = {**value, name: mutations["json"](value[name], chance)}
        if chance.random() < 0.3 and isinstance(value.get("task"), dict):
            key = chance.choice(["doc_to_text", "doc_to_target", "description"])
            value["task"] = {**value["task"], key: chance.choice(HOSTILE)}
        return value

    fuzz(use, [{"task": CHOICE, "rows": ROWS}, {"task": WRITTEN, "rows": ROWS}], mutate)
