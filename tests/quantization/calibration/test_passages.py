"""The built-in text: passages of many kinds first, docstrings behind them."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data import topics

import pytest

from quantkit.evaluation.text import load_text
from quantkit.quantization.calibration import builtin_text
from quantkit.quantization.calibration.builtin_text import builtin_documents, prose, stdlib
from quantkit.quantization.calibration.data import load_calibration
from quantkit.quantization.calibration.overlap import Passages
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.sources.open import open_source
from quantkit.support.errors import CalibrationError
from quantkit.testing import VOCAB, tiny_model
from quantkit.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tiny_model(tmp_path_factory.mktemp("models") / "model", "qwen2")
    return dict(open_source(str(folder)).side_files())


@pytest.fixture(scope="module")
def tokenizer(files) -> Tokenizer:
    return Tokenizer(files, {})


def tokens(tokenizer, documents) -> int:
    return sum(len(tokenizer.encode(document.content, special=False)) for document in documents)


def names(documents) -> list[str]:
    return [document.where.removeprefix("builtin, ") for document in documents]


def test_few_tokens_need_passages_only(tokenizer):
    documents = builtin_documents(1, tokenizer)
    assert "docstrings" not in names(documents) and len(documents) > 20
    assert not any(document.is_chat for document in documents), "packing stays that of texts"
    text = "\n".join(document.content for document in documents)
    for sign in ("def __init__", "#include", "BEZEICHNUNG", "Theorem 2", "长城", "SELECT ", " = = History"):
        assert sign in text


@pytest.mark.parametrize("more", [1, 700, 20_000])
def test_docstrings_are_what_is_missing_and_hardly_more(tokenizer, more):
    base = tokens(tokenizer, builtin_documents(1, tokenizer))
    documents = builtin_documents(base + more, tokenizer)
    assert names(documents)[-1] == "docstrings" and names(documents).count("docstrings") == 1
    assert more <= tokens(tokenizer, documents) - base <= 1.3 * more + 200


def test_conversations_are_written_by_the_template(tokenizer, files):
    chats = [document.content for document in builtin_documents(1, tokenizer)
             if document.where.endswith("chats.jsonl")]
    lines = (builtin_text._FOLDER / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    assert chats == [tokenizer.chat_text(json.loads(line)["messages"], answer=False) for line in lines]


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}",
                                      "{{ strftime_now('%d %B %Y') }}{{ messages[0].content }}"])
def test_conversations_are_plain_text_without_a_template(files, template):
    config = json.loads(files["tokenizer_config.json"])
    config.pop("chat_template", None)
    if template:
        config["chat_template"] = template
    changed = {name: data for name, data in files.items() if name != "chat_template.jinja"}
    tokenizer = Tokenizer(changed | {"tokenizer_config.json": json.dumps(config).encode()}, {})
    assert tokenizer.has_chat == bool(template)
    chats = [document.content for document in builtin_documents(1, tokenizer)
             if document.where.endswith("chats.jsonl")]
    assert chats[0].startswith("user: What's the difference") and "\n\nassistant: Both can" in chats[0]


def test_a_python_without_sources_has_the_passages(files, tokenizer, monkeypatch):
    monkeypatch.setattr(builtin_text, "prose", lambda characters: "")
    spec = CalibrationSpec(text="builtin", windows=4, window=32)
    assert load_calibration(spec, tokenizer, VOCAB, 64).tokens.shape == (4, 32)
    with pytest.raises(CalibrationError, match="built-in calibration text is too short") as caught:
        builtin_documents(10**6, tokenizer)
    assert "--calibration FILE" in caught.value.next


def test_windows_that_are_left_out_leave_enough(tokenizer, tmp_path):
    path = tmp_path / "exam.txt"
    path.write_text((builtin_text._FOLDER / "novel.txt").read_text(encoding="utf-8"), encoding="utf-8")
    spec = CalibrationSpec(text="builtin", windows=64, window=512, avoid=(str(path),))
    data = load_calibration(spec, tokenizer, VOCAB, 64)
    assert data.coverage.avoided > 0 and data.tokens.shape == (64, 512)
    assert not any("novel.txt" in origin for origin in data.origins)


def test_nothing_that_models_are_evaluated_on(shared_data):
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(builtin_text._FOLDER.iterdir()))
    exams = [load_text().content]
    for name in ("wikitext-2/wiki.test.raw", "longctx/pride_and_prejudice.txt", "longctx/war_and_peace.txt",
                 "calibration/dolly_hhrlhf_train_small.jsonl", "tasks/gsm8k_test.jsonl"):
        exams.append((shared_data / name).read_text(encoding="utf-8"))
    for exam in exams:
        assert Passages(exam).share(text) == 0


# -- docstrings: prose, deterministic, apart from the evaluation text, never an error

DOCSTRINGS = {
    "one.py": b'''"""A sentence that is long enough to count as a paragraph of prose.

    >>> code.that(is_not) == "prose of any kind at all, ever"

Short.

A second paragraph,
over two lines, joined into a single one.
"""
def f():
    """The docstring of a function is text like any other one."""
''',
    "package/two.py": b'''class C:
    """The docstring of a class, which is inside of a package."""
''',
    "pydoc_data/x.py": b'"""This paragraph must never be part of the calibration text."""',
    "test/x.py": b'"""Nor must this paragraph be part of the calibration text."""',
    "broken.py": b"def (:",
    "bytes.py": b'"""\xff\xfe not utf-8 but long enough to be a paragraph of text"""',
    "notes.txt": b'"""This file has a different ending, so that nobody looks at it."""',
}


def test_prose_of_a_folder(tmp_path: Path) -> None:
    for name, content in DOCSTRINGS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    paragraphs = prose(10_000, tmp_path).split("\n\n")
    assert sorted(paragraphs) == [
        "A second paragraph, over two lines, joined into a single one.",
        "A sentence that is long enough to count as a paragraph of prose.",
        "The docstring of a class, which is inside of a package.",
        "The docstring of a function is text like any other one."]
    assert len(prose(70, tmp_path)) == 70
    assert prose(10_000, tmp_path / "test" / "missing") == ""


def test_of_this_python() -> None:
    text = prose(60_000)
    assert len(text) > 55_000 and text == prose(60_000)
    letters = sum(c.isalpha() or c.isspace() for c in text) / len(text)
    assert letters > 0.9, "prose, not code"
    assert (stdlib() / "os.py").is_file()


def test_shares_no_paragraph_with_the_evaluation_text() -> None:
    evaluation = " ".join(" ".join(topics.topics.values()).split())
    *paragraphs, _ = prose(120_000).split("\n\n")  # the last is cut, in some Pythons after four letters
    assert len(paragraphs) > 100 and not [paragraph for paragraph in paragraphs if paragraph in evaluation]
