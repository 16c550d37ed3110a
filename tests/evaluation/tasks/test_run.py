"""Tasks from file to score: what lm-eval itself makes of the same files, model and data."""

import json
import math
import os
import re
import subprocess
import sys
import warnings

import pytest

from quantkit.evaluation.tasks.file import find_task
from quantkit.evaluation.tasks.lm_eval_model import lm_eval_model
from quantkit.evaluation.tasks.run import chosen, list_tasks, prepare_tasks, run_tasks
from quantkit.kv.spec import parse_kv
from quantkit.support.errors import QuantkitError, UsageError

WORDS = re.findall(r"\w+", "the cat and dog in house of a man sat on red mat with tall hat is it")


def words(seed, count):
    return " ".join(WORDS[(seed * 7 + i * i + 3 * i) % len(WORDS)] for i in range(count))


def choice(i, count=4):
    return {"query": f"Question: {words(i, 6)}?", "gold": i % count,
            "choices": [words(i + k + 1, 1 + (i + k) % 3) for k in range(count)]}


DATA = {
    "arc_easy.jsonl": [choice(i) for i in range(9)],
    "copa.jsonl": [choice(i, 2) for i in range(4)],
    "winogrande.jsonl": [{"context_options": [words(i, 3) + " so", words(i + 1, 4) + " so"],
                          "continuation": words(i + 2, 3), "gold": i % 2} for i in range(5)],
    "hellaswag_val.jsonl": [{"activity_label": "Cook", "ctx_a": words(i, 4) + " [title] " + words(i, 2),
                             "ctx_b": words(i, 1), "label": i % 4,
                             "endings": [f" [step] {words(i + k, 3)}  it." for k in range(4)]}
                            for i in range(4)],
    "lambada_openai.jsonl": [{"context": words(i, 9), "continuation": words(i + 3, 1)} for i in range(6)],
    "mmlu_test.jsonl": [{"subject": s, "question": f" {words(i, 5)}? ", "answer": i % 4,
                         "choices": [words(i + k, 1) for k in range(4)]}
                        for i, s in enumerate(["law_school"] * 3 + ["art"] * 2)],
    "mmlu_dev.jsonl": [{"subject": s, "question": words(i, 3), "answer": i % 4,
                        "choices": ["a", "b", "c", "d"]} for s in ("art", "law_school") for i in range(6)],
    "gsm8k_test.jsonl": [{"question": f"{words(i, 8)}?", "answer": f"It is <<1+{i}={i}>>.\n#### {i}"}
                         for i in range(3)],
}
OWN = """\
task: ppl
dataset_path: json
dataset_kwargs: {data_files: {test: copa.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
GENERATES = """\
task: writes
dataset_path: json
dataset_kwargs: {data_files: {test: gsm8k_test.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: " {{answer[:2]}}"
generation_kwargs: {until: ["z"], max_gen_toks: 12}
metric_list: [{metric: exact_match, ignore_case: true, regexes_to_ignore: [","]}]
filter_list:
  - name: letter
    filter: [{function: regex, regex_pattern: "([a-z])", fallback: i}, {function: take_first}]
  - name: all
    filter: [{function: lowercase}, {function: remove_whitespace}, {function: take_first}]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, rows in DATA.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ppl.yaml").write_text(OWN)
    (folder / "writes.yaml").write_text(GENERATES)
    return folder


@pytest.fixture(scope="module")
def their_datasets(tmp_path_factory):
    """lm-eval's own loader; what it caches goes to a temporary folder."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


def theirs(path, data, model, monkeypatch):
    """lm-eval reads our file itself, from the folder with the data, and runs it if there is a model."""
    from lm_eval import evaluate
    from lm_eval.api.task import ConfigurableTask
    from ruamel.yaml import YAML

    monkeypatch.chdir(data)
    task = ConfigurableTask(config=YAML(typ="safe", pure=True).load(path.read_text()))
    task.set_fewshot_seed(1234)
    if model is None:
        task.build_all_requests()
        return task, {}
    found = evaluate(model, {task.config.task: task}, bootstrap_iters=0)
    return task, found["results"][task.config.task]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["arc_easy", "copa", "winogrande", "hellaswag", "lambada_openai", "ppl",
                                  "writes"])
def test_what_lm_eval_makes_of_the_same_file(name, data, loaded, their_datasets, monkeypatch):
    named = str(data / f"{name}.yaml") if name in ("ppl", "writes") else name
    (ready,) = prepare_tasks([named], data=data)
    scores = run_tasks(loaded, [ready], batch=4)
    task, results = theirs(find_task(named)[1], data, lm_eval_model(loaded, batch=4), monkeypatch)
    ours = [one for part in ready.parts for one in part.instances]
    assert [one.args for one in ours] == [one.args for one in task.instances]
    expected = {key.removesuffix(",none"): value for key, value in results.items()
                if "," in key and "stderr" not in key}
    assert {one.metric: pytest.approx(one.interval.value, rel=1e-6) for one in scores} == expected
    for one in scores:
        assert one.task == task.config.task and one.items == len(task.eval_docs)
        assert one.interval.low <= one.interval.value <= one.interval.high


def test_the_prompts_of_gsm8k(data, their_datasets, monkeypatch):
    (ready,) = prepare_tasks(["gsm8k"], data=data)
    task, _ = theirs(find_task("gsm8k")[1], data, None, monkeypatch)
    assert [one.args for one in ready.parts[0].instances] == [one.args for one in task.instances]
    prompt = task.instances[0].args[0]
    assert prompt.count("####") == 4 and prompt.endswith("?\nAnswer:")


def test_mmlu_shows_examples_of_the_same_subject(data, loaded):
    (ready,) = prepare_tasks(["mmlu"], data=data)
    assert ready.items == 5 and len(ready.parts) == 2
    prompt = ready.parts[1].instances[0].args[0]
    assert prompt.startswith("The following are multiple choice questions (with answers) about art.\n\n")
    assert prompt.count("Answer:") == 6 and prompt.endswith("\nAnswer:") and "law" not in prompt
    dev = [row for row in DATA["mmlu_dev.jsonl"] if row["subject"] == "art"]
    assert all(f"{row['question']}\nA. a" in prompt for row in dev[:5]) and dev[5]["question"] not in prompt
    (found,) = run_tasks(loaded, [ready])
    assert found.items == 5 and len(found.choices) == 5
    right = sum(c == row["answer"] for c, row in zip(found.choices, DATA["mmlu_test.jsonl"]))
    assert found.interval.value == right / 5


def test_choices_are_those_that_the_score_counts(data, loaded):
    scores = {one.metric: one for one in run_tasks(loaded, ["arc_easy"], data=data)}
    assert set(scores) == {"acc", "acc_norm"}
    for one in scores.values():
        golds = [row["gold"] for row in DATA["arc_easy.jsonl"]]
        assert one.interval.value == sum(a == b for a, b in zip(one.choices, golds)) / 9
        assert one.values == tuple(float(a == b) for a, b in zip(one.choices, golds))
    results = [(-4.0, False), (-3.0, False)]
    assert [chosen(metric, ["abcdefgh", "ab"], results) for metric in ("acc", "acc_norm")] == [1, 0]
    assert chosen("acc_bytes", ["äöüäöü", "abcd"], [(-6.0, False), (-2.4, False)]) == 0


@pytest.mark.parametrize("name", ["arc_easy", "winogrande", "lambada_openai", "mmlu", "ppl", "writes"])
def test_each_item_has_a_value(name, data, loaded):
    named = str(data / f"{name}.yaml") if name in ("ppl", "writes") else name
    for result in run_tasks(loaded, [named], data=data):
        assert len(result.values) == result.items and all(isinstance(value, float) for value in result.values)
        mean = sum(result.values) / result.items
        expected = math.exp(mean) if "perplexity" in result.metric else mean
        assert result.interval.value == pytest.approx(expected)


def test_a_fingerprint_says_what_was_asked(data, tmp_path):
    names = ["arc_easy", "winogrande", "lambada_openai", "mmlu", str(data / "writes.yaml")]
    first, again = (prepare_tasks(names, data=data) for _ in range(2))
    prints = [task.fingerprint for task in first]
    assert prints == [task.fingerprint for task in again] and len(set(prints)) == len(names)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in prints)
    assert prepare_tasks(["arc_easy"], data=data, limit=8)[0].fingerprint != prints[0]
    rows = [choice(i) for i in range(9)]
    for row, change in ((3, {"query": "Question: it?"}), (3, {"gold": 0}), (8, {"choices": [*"abcd"]})):
        changed = [*rows]
        changed[row] = rows[row] | change
        (tmp_path / "arc_easy.jsonl").write_text("".join(json.dumps(item) + "\n" for item in changed))
        assert prepare_tasks(["arc_easy"], data=tmp_path)[0].fingerprint != prints[0]


def test_limit_and_reuse_for_several_settings(data, loaded):
    ready = prepare_tasks(["arc_easy", "lambada_openai"], data=data, limit=4)
    plain = run_tasks(loaded, ready)
    assert [one.items for one in plain] == [4] * 4
    assert plain == run_tasks(loaded, ["arc_easy", "lambada_openai"], data=data, limit=4) == run_tasks(
        loaded, ready)
    perplexity = {kv: next(one.interval.value for one in run_tasks(loaded, ready, kv=parse_kv(kv))
                           if one.metric == "perplexity") for kv in ("none", "bf16", "window(2, sinks=0)")}
    assert perplexity["bf16"] == pytest.approx(perplexity["none"], rel=0.05)
    assert perplexity["window(2, sinks=0)"] != pytest.approx(perplexity["none"], rel=0.05)


def test_progress_names_the_task(data, loaded):
    told = []
    run_tasks(loaded, ["copa"], data=data, kv=parse_kv("int8"), progress=told.append)
    assert told[-1].done == told[-1].total == 8 and told[-1].label == "copa, bf16 kv int8"


def test_bars_and_advice_stay_away_from_people(data, loaded, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_tasks(loaded, [str(data / "writes.yaml"), "arc_easy"], data=data, limit=1)
    assert capfd.readouterr() == ("", "")


def test_what_is_wrong_is_said_before_a_model_is_needed(data, tmp_path):
    with pytest.raises(UsageError, match="arc_easy is given twice"):
        prepare_tasks(["arc_easy", "arc_easy"], data=data)
    with pytest.raises(UsageError, match="no task is called"):
        prepare_tasks(["arc_esay"], data=data)
    with pytest.raises(UsageError, match=r"piqa\.jsonl"):
        prepare_tasks(["piqa"], data=data)
    with pytest.raises(UsageError):
        prepare_tasks([str(tmp_path / "nothing.yaml")], data=data)
    assert "arc_easy" in [info.name for info in list_tasks()]


def test_without_lm_eval_it_says_what_to_install(data, monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.task"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(QuantkitError) as caught:
        prepare_tasks(["arc_easy"], data=data)
    assert caught.value.next == "pip install lm-eval"


def test_no_network_and_nothing_written(data, tiny, tmp_path):
    code = f"""
import socket

def refuse(*args, **kwargs):
    raise AssertionError("the network was asked for")

socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from pathlib import Path
from quantkit.evaluation.tasks.run import run_tasks
from quantkit.runtime.loader import load

names = ["arc_easy", "mmlu", "lambada_openai"]
found = run_tasks(load({str(tiny)!r}), names, data=Path({str(data)!r}), limit=2)
print([one.metric for one in found])
"""
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HF_DATASETS_CACHE"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=home, env=env,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['acc', 'acc_norm', 'acc', 'perplexity', 'acc']"
    assert [path for path in home.rglob("*") if path.is_file()] == []
