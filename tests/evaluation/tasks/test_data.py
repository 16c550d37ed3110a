"""Rows become prompts; whatever is missing or doesn't fit is named with its file and line."""

import json

import pytest

from quantkit.evaluation.tasks.data import VARIABLE, load_prompts
from quantkit.evaluation.tasks.file import TaskFile, read_task
from quantkit.support.errors import UsageError

HEAD = """\
task: mine
dataset_path: json
test_split: test
metadata: {rows: '{"q": "…"}', source: https://x.y}
"""
CHOICE = HEAD + """\
dataset_kwargs: {data_files: {test: mine.jsonl}}
output_type: multiple_choice
doc_to_text: "Q: {{q}}\\nA:"
doc_to_target: gold
doc_to_choice: options
metric_list: [{metric: acc}]
"""
GROUPED = (CHOICE.replace("{test: mine.jsonl}", "{test: mine.jsonl, dev: dev.jsonl}")
           .replace("source: https://x.y", "group_by: subject")
           + "fewshot_split: dev\nnum_fewshot: 1\ndescription: \"About {{subject}}.\\n\\n\"\n")
ROWS = [{"q": "one?", "options": ["a", "b"], "gold": 1},
        {"q": "two?", "options": ["c", "d", "e"], "gold": "0"},
        {"q": "three?", "options": ["f", "g"], "gold": "g"}]


@pytest.fixture
def task(tmp_path):
    """``task(yaml)`` → the task; data goes beside it."""
    def make(text: str) -> TaskFile:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return read_task(path)

    return make


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_rows(task, tmp_path):
    write(tmp_path / "mine.jsonl", ROWS)
    (found,) = load_prompts(task(CHOICE), "mine.yaml", tmp_path)
    assert found.group == "" and found.examples == ()
    assert found.rows[0] == {"description": "", "text": "Q: one?\nA:", "target": 1, "choices": ["a", "b"]}
    assert [row["target"] for row in found.rows] == [1, 0, 1]
    assert len(load_prompts(task(CHOICE), "mine.yaml", tmp_path, limit=2)[0].rows) == 2
    assert len(load_prompts(task(CHOICE), "mine.yaml", tmp_path, limit=9)[0].rows) == 3


def test_groups_get_their_own_examples_and_their_share(task, tmp_path):
    subjects = ["law"] * 4 + ["art"] * 2 + ["law"]
    write(tmp_path / "mine.jsonl", [{**ROWS[0], "q": str(i), "subject": s} for i, s in enumerate(subjects)])
    write(tmp_path / "dev.jsonl", [{**ROWS[0], "q": s, "subject": s} for s in ("art", "law", "art")])
    found = load_prompts(task(GROUPED), "mine.yaml", tmp_path)
    counts = [(part.group, len(part.rows), len(part.examples)) for part in found]
    assert counts == [("law", 5, 1), ("art", 2, 2)]
    assert found[1].examples[0]["text"] == "Q: art\nA:"
    assert found[0].rows[0]["description"] == "About law.\n\n"
    for limit, shares in ((1, [1]), (3, [2, 1]), (5, [3, 2]), (6, [4, 2])):
        assert [len(part.rows) for part in load_prompts(task(GROUPED), "t", tmp_path, limit)] == shares
    write(tmp_path / "dev.jsonl", [{**ROWS[0], "subject": "law"}])
    with pytest.raises(UsageError, match="1 examples of subject 'art'"):
        load_prompts(task(GROUPED), "mine.yaml", tmp_path)
    write(tmp_path / "mine.jsonl", ROWS)
    with pytest.raises(UsageError, match="line 1 has no 'subject'"):
        load_prompts(task(GROUPED), "mine.yaml", tmp_path)


def test_a_missing_file_says_everything(task, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UsageError) as caught:
        load_prompts(task(CHOICE), "mine.yaml", None)
    assert "mine.jsonl" in caught.value.what and '{"q": "…"}' in caught.value.why
    assert "--task-data" in caught.value.next and VARIABLE in caught.value.next and "x.y" in caught.value.next
    with pytest.raises(UsageError, match=str(tmp_path / "mine.jsonl")):
        load_prompts(task(CHOICE), "mine.yaml", tmp_path)
    write(tmp_path / "mine.jsonl", ROWS)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert len(load_prompts(task(CHOICE), "mine.yaml", None)[0].rows) == 3
    with pytest.raises(UsageError):  # what is given outranks the environment
        load_prompts(task(CHOICE), "mine.yaml", tmp_path / "nowhere")


@pytest.mark.parametrize(("content", "said"), [
    (b"", "is empty"), (b"\n \n", "is empty"), (b'{"q": 1', "line 1 is not JSON"), (b"\xff\xfe", "not JSON"),
    (b'{"q": "\\ud800", "options": ["a", "b"], "gold": 0}', "line 1 is not JSON"),
    (b'{"q": "\xed\xa0\x80", "options": ["a", "b"], "gold": 0}', "line 1 is not JSON"),
    (b"[1]", "not a JSON object"), (b"[" * 100_000, "not JSON"),
    (b'{"q": "x", "options": ["a"], "gold": 0}\n{"q": "x"}', "line 2"),
    (b'{"q": "x", "options": ["a", "b"], "gold": 2}', "none of 2 choices"),
    (b'{"q": "x", "options": ["a", "b"], "gold": -1}', "none of 2 choices"),
    (b'{"q": "x", "options": ["a", "b"], "gold": "c"}', "none of 2 choices"),
    (b'{"q": "x", "options": ["a", "b"], "gold": 0.0}', "none of 2 choices"),
    (b'{"q": "x", "options": ["a", "b"], "gold": "' + b"1" * 5000 + b'"}', "none of 2 choices"),
    (b'{"q": "x", "options": ["a", 1], "gold": 0}', "list of texts"),
    (b'{"q": "x", "options": ["a", ""], "gold": 0}', "list of texts"),
    (b'{"q": "x", "options": "a", "gold": 0}', "list of texts"),
    (b'{"options": ["a", "b"], "gold": 0}', "'q' is undefined")])
def test_data_that_does_not_fit(task, tmp_path, content, said):
    (tmp_path / "mine.jsonl").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_prompts(task(CHOICE), "mine.yaml", tmp_path)
    assert said in str(caught.value) and "mine.jsonl" in str(caught.value)


def test_a_byte_order_mark_and_other_line_ends(task, tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\r\n\r\n")
    assert len(load_prompts(task(CHOICE), "mine.yaml", tmp_path)[0].rows) == 1


def test_the_shipped_tasks_over_real_files(shared_data, tmp_path):
    from quantkit.evaluation.tasks.file import find_task, list_tasks

    folder, checked = tmp_path / "data", 0
    folder.mkdir()
    for path in (shared_data / "tasks").glob("*.jsonl"):
        (folder / path.name.replace("_val_1000", "_val")).symlink_to(path)
    for info in list_tasks():
        task, path = find_task(info.name)
        parts = load_prompts(task, str(path), folder, limit=60)
        assert sum(len(part.rows) for part in parts) == 60
        checked += 1
    assert checked >= 11
