"""The built-in text: prose, deterministic, apart from the evaluation text, never an error."""

from pathlib import Path
from pydoc_data import topics

from quantkit.quantization.calibration.builtin_text import prose, stdlib

FILES = {
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
    for name, content in FILES.items():
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
