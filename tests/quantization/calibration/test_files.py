"""Files as they are found and read: as much as is needed, and nothing that is broken."""

import hashlib
import json
from pathlib import Path

import pytest

from quantkit.quantization.calibration.files import (
    DataFile,
    local_files,
    read_file,
    read_files,
    shares,
    some_of,
)
from quantkit.support.errors import CalibrationError

PLENTY = 1 << 20


def written(path: Path, content: str | bytes) -> DataFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return DataFile(path.name, path)


def texts(documents) -> list[str]:
    return [one.content for one in documents]


def test_a_file_of_any_name_is_text(tmp_path):
    file = written(tmp_path / "wiki.valid.raw", "\ufeffOnce upon\n")
    assert local_files(str(file.path)) == [file]
    (found,) = read_file(file, PLENTY)
    assert (found.content, found.where) == ("Once upon\n", "wiki.valid.raw")
    assert file.sha256() == hashlib.sha256(file.path.read_bytes()).hexdigest()


def test_a_folder_is_its_texts_in_order(tmp_path):
    for name in ("b.md", "a.txt", "deep/c.txt", ".git/d.txt", "e.py", "f.jsonl"):
        written(tmp_path / "book" / name, name)
    found = local_files(str(tmp_path / "book"))
    assert [one.name for one in found] == ["book/a.txt", "book/b.md", "book/deep/c.txt"]
    assert [texts(documents) for _, documents in read_files(found, PLENTY)] == [["a.txt"], ["b.md"],
                                                                              ["deep/c.txt"]]


def test_a_folder_without_texts_says_what_is_there(tmp_path):
    written(tmp_path / "chats.jsonl", "{}")
    with pytest.raises(CalibrationError, match=r"holds no \.txt or \.md") as caught:
        local_files(str(tmp_path))
    assert "chats.jsonl" in caught.value.next


@pytest.mark.parametrize("name", ["nope.txt", "no\0file", "~nobody-of-that-name/x", "x" * 5000])
def test_what_is_not_there(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CalibrationError, match="can't be read") as caught:
        local_files(name)
    assert caught.value.why and "builtin" in caught.value.next


def test_lines_are_numbered_and_empty_ones_passed_over(tmp_path):
    lines = ["", json.dumps({"text": "one"}), "  ", json.dumps({"text": ""}), json.dumps({"text": "two"}), ""]
    found = read_file(written(tmp_path / "a.jsonl", "\ufeff" + "\r\n".join(lines)), PLENTY)
    assert [(one.where, one.content) for one in found] == [("a.jsonl line 2", "one"),
                                                           ("a.jsonl line 5", "two")]


def test_rows_that_can_not_be_used_are_left_out(tmp_path):
    file = written(tmp_path / "a.jsonl",
                   '{"text": null}\n{"text": "one"}\n{"messages": null}\n{"text": "two"\n')
    unusable: list[CalibrationError] = []
    assert texts(read_file(file, PLENTY, unusable)) == ["one"]
    assert [error.what.partition(": ")[0][:14] for error in unusable] == [
        "a.jsonl line 1", "a.jsonl line 3", "a.jsonl line 4"]
    with pytest.raises(CalibrationError, match=r"line 1: 'text' is not text"):
        read_file(written(tmp_path / "b.jsonl", '{"text": null}\n{"text": 3}'), PLENTY, unusable)
    assert len(unusable) == 3, "a file without a row that can be used is an error of its own"


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_and_objects_over_several_lines(tmp_path, name, indent):
    rows = [{"text": "one"}, {"text": ""}, {"text": "[two]"}]
    array = json.dumps(rows, indent=indent)
    file = written(tmp_path / name, "\ufeff " + array + "\n")
    assert [(one.where, one.content) for one in read_file(file, PLENTY)] == [
        (f"{name} item 1", "one"), (f"{name} item 3", "[two]")]
    assert texts(read_file(file, len(array) - 8)) == ["one"], "as far as it is read"
    objects = "\n".join(json.dumps(row, indent=2) for row in rows)
    assert texts(read_file(written(tmp_path / name, objects), PLENTY)) == ["one", "[two]"]
    with pytest.raises(CalibrationError, match=f"{name} line 1 ") as caught:
        read_file(written(tmp_path / name, "[\n" + objects), PLENTY)  # neither an array nor lines
    assert "or is one JSON array of objects" in caught.value.next


def test_what_is_broken_within_the_part_that_is_read_is_not_taken_for_its_end(tmp_path):
    row = json.dumps({"text": "one"}, indent=2)
    file = written(tmp_path / "a.jsonl", f"{row}\n{row}\n{{\n  broken\n}}\n" + f"{row}\n" * 50)
    for limit in (200, PLENTY):
        with pytest.raises(CalibrationError, match=r"a\.jsonl line 1 is not JSON"):
            read_file(file, limit)
    escaped = json.dumps([{"text": "one"}, {"text": "\N{SNOWMAN}"}])
    for limit in range(len(escaped) - 20, len(escaped) - 3):
        assert texts(read_file(written(tmp_path / "b.json", escaped), limit)) == ["one"], limit


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.txt", b"", "is empty"), ("a.txt", b" \n ", "is empty"), ("a.txt", b"caf\xe9 noir", "is not UTF-8"),
    ("a.jsonl", b"", "is empty"), ("a.jsonl", b'{"text": ""}\n', "is empty"),
    ("a.jsonl", b'{"text": "caf\xe9"}', "line 1 is not UTF-8"), ("a.parquet", b"PAR1", "as parquet")])
def test_unusable_files(tmp_path, name, content, said):
    with pytest.raises(CalibrationError, match=said) as caught:
        read_file(written(tmp_path / name, content), PLENTY)
    assert name in caught.value.what and caught.value.next


def test_a_large_text_is_read_in_part_even_inside_a_character(tmp_path):
    file = written(tmp_path / "a.txt", "x" * 511 + "é" * 1000)
    assert texts(read_file(file, 512)) == ["x" * 511]
    assert texts(read_file(written(tmp_path / "b.txt", "x" * 511 + "é"), 512)) == ["x" * 511]
    with pytest.raises(CalibrationError, match="is not UTF-8"):
        read_file(written(tmp_path / "c.txt", b"x" * 5 + b"\xc3"), 512)


def test_of_a_large_jsonl_whole_lines_are_read(tmp_path):
    file = written(tmp_path / "a.jsonl", '{"text": "one"}\n' * 3 + '{"text": "' + "x" * 500)
    assert texts(read_file(file, 60)) == ["one"] * 3
    with pytest.raises(CalibrationError, match=r"first line of b\.jsonl is longer than 100 bytes"):
        read_file(written(tmp_path / "b.jsonl", '{"text": "' + "x" * 500 + '"}\n'), 100)


@pytest.mark.parametrize(("sizes", "limit", "expected"), [
    ([10, 10], 100, [10, 10]), ([100, 10, 40], 90, [40, 10, 40]), ([100, 100], 51, [26, 25]), ([], 5, []),
    ([7], 5, [5])])
def test_what_small_files_leave_goes_to_the_others(sizes, limit, expected):
    assert sorted(shares(sizes, limit)) == sorted(expected)
    assert sum(shares(sizes, limit)) == min(sum(sizes), limit)
    assert all(share <= size for share, size in zip(shares(sizes, limit), sizes, strict=True))


def test_of_a_folder_of_many_files_some_are_read(tmp_path):
    files = [written(tmp_path / f"{number:03}.md", "x" * 10_000) for number in range(300)]
    some = some_of(files, 1 << 20, 0)
    assert len(some) == 105 and some == sorted(some, key=lambda file: file.name)
    assert sum(len(text) for _, found in read_files(some, 1 << 20) for text in texts(found)) == 1 << 20
    assert some != some_of(files, 1 << 20, 1) and some == some_of(files, 1 << 20, 0)
    assert some_of(files[:5], 1 << 20, 0) == files[:5], "all where there is room"
    large = [written(tmp_path / f"{number}.txt", "y" * 2_000_000) for number in range(9)]
    assert len(some_of(large, 1 << 20, 0)) == 4, "SHARE each"
    assert len(some_of(large, 1000, 0)) == 1
