"""Task files: what is shipped is sound, what is broken is an error that names its line."""

from types import SimpleNamespace

import pytest

from quantkit.evaluation.tasks.file import METRICS, find_task, list_tasks, read_task
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import current
from quantkit.support.errors import UsageError

GOOD = """\
task: mine
dataset_path: json
dataset_kwargs:
  data_files: {test: mine.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: query
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - metric: acc
metadata: {about: Mine., rows: '{"query": "…"}'}
"""


@pytest.fixture
def folder(tmp_path):
    """A plugin's folder of tasks, beside the shipped ones."""
    current.cache_clear()
    current().add(SimpleNamespace(eval_dirs=hookimpl(lambda: [tmp_path])), "somebody")
    (tmp_path / "tasks").mkdir()
    yield tmp_path / "tasks"
    current.cache_clear()


def test_every_shipped_task():
    found = {info.name: info for info in list_tasks()}
    assert set(found) >= {"arc_easy", "arc_challenge", "piqa", "hellaswag", "winogrande", "openbook_qa",
                          "copa", "boolq", "lambada_openai", "mmlu", "gsm8k"}
    for info in found.values():
        assert info.about.endswith(".") and info.owner == "quantkit"
        assert set(info.metrics) <= set(METRICS[info.kind]) and info.files
        task, path = find_task(info.name)
        assert path == info.path and task.metadata.rows.startswith("{") and "https://" in task.metadata.source


def test_a_plugins_task_and_a_users_file(folder, tmp_path):
    (folder / "mine.yaml").write_text(GOOD)
    assert find_task("mine")[0].metadata.about == "Mine."
    assert [(i.owner, i.files) for i in list_tasks() if i.name == "mine"] == [("somebody", ("mine.jsonl",))]
    own = tmp_path / "else.yaml"
    own.write_text(GOOD)
    assert find_task(str(own)) == (read_task(own), own)


def test_an_unknown_name():
    with pytest.raises(UsageError) as caught:
        find_task("arc_esay")
    assert "'arc_easy'" in caught.value.why and caught.value.next


def test_names_that_clash(folder):
    (folder / "other.yaml").write_text(GOOD)
    for look in (list_tasks, lambda: find_task("other")):
        with pytest.raises(UsageError, match="'task: other'"):
            look()
    (folder / "other.yaml").unlink()
    (folder / "piqa.yaml").write_text(GOOD.replace("task: mine", "task: piqa"))
    for look in (list_tasks, lambda: find_task("piqa")):
        with pytest.warns(UserWarning, match="of somebody is left out: 'piqa' is a name of quantkit's own"):
            look()
    assert find_task("piqa")[1].parent != folder


def test_two_plugins_with_a_task_of_the_same_name(folder):
    (folder / "mine.yaml").write_text(GOOD)
    current().add(SimpleNamespace(eval_dirs=hookimpl(lambda: [folder.parent])), "somebody-else")
    with pytest.raises(UsageError, match="two tasks are called 'mine'"):
        find_task("mine")


def test_a_broken_file_is_never_skipped(folder):
    (folder / "bad.yaml").write_text(GOOD.replace("task: mine", "task: bad").replace("gold", "!function x.y"))
    for look in (list_tasks, lambda: find_task("bad")):
        with pytest.raises(UsageError) as caught:
            look()
        assert "bad.yaml" in caught.value.what and "line 8" in caught.value.why


@pytest.mark.parametrize(("old", "new", "said"), [
    ("doc_to_text: query", "doc_to_text: !function utils.f", "line 7"),
    ("doc_to_text: query", "doc_to_txt: query", "'doc_to_text'"),
    ("task: mine", "include: ../other.yaml\ntask: mine", "include"),
    ("dataset_path: json", "dataset_path: allenai/ai2_arc", "json"),
    ("mine.jsonl", "../mine.jsonl", "plain file name"),
    ("mine.jsonl", "/etc/passwd", "plain file name"),
    ("mine.jsonl", "..", "plain file name"),
    ("mine.jsonl", "a\\b.jsonl", "plain file name"),
    ("mine.jsonl", "https://x/y.jsonl", "plain file name"),
    ("test_split: test", "test_split: validation", "validation"),
    ("metric: acc", "metric: bleu", "acc_norm"),
    ("metric_list:\n  - metric: acc", "metric_list: []", "metric_list"),
    ("task: mine", "task: ../mine", "task"),
    ("doc_to_choice: choices\n", "", "doc_to_choice"),
    ("test_split: test", "test_split: test\nnum_fewshot: 2", "fewshot_split"),
    ("test_split: test", "test_split: test\nfewshot_split: test\nnum_fewshot: 2", "answers"),
    ("test_split: test", "test_split: test\ngeneration_kwargs: {}", "generate_until"),
    ("test_split: test", "test_split: test\ncustom_dataset: os.system", "custom_dataset"),
    ("test_split: test", "test_split: test\nfilter_list: [{name: a, filter: [{function: regex, "
     "regex_pattern: '('}, {function: take_first}]}]", "regular expression"),
    ("test_split: test", "test_split: test\nfilter_list: [{name: a, filter: [{function: regex, "
     f"regex_pattern: '{'(' * 900}'}}, {{function: take_first}}]}}]", "regular expression"),
    ("test_split: test", "test_split: test\nfilter_list: [{name: a, filter: [{function: regex, "
     f"regex_pattern: '{'x' * 1001}'}}, {{function: take_first}}]}}]", "longer than 1000"),
    ("test_split: test", "test_split: test\nfilter_list: [{name: a, filter: [{function: regex, "
     "regex_pattern: 'a{99999999999}'}, {function: take_first}]}]", "regular expression"),
    ("test_split: test", "test_split: test\nfilter_list: [{name: a, filter: [{function: regex}]}]",
     "take_first"),
    ("test_split: test", "test_split: test\nfilter_list: [{name: a, filter: [{function: os.system}]}]",
     "take_first"),
    ("test_split: test", "test_split: test\nfilter_list: [{name: a, filter: [{function: take_first, "
     "fallback: x}]}]", "regex"),
    ("metric: acc", "metric: acc\n  - metric: acc\n    code: x", "code")])
def test_task_files_that_are_refused(tmp_path, old, new, said):
    assert old in GOOD
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    read_task(path)
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        read_task(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
