"""Parquet files: their text is read, and nothing that they are made of takes this process with it."""

import pytest

from quantkit.quantization.calibration import parquet as module
from quantkit.quantization.calibration.files import DataFile, read_file
from quantkit.support.errors import CalibrationError

PLENTY = 1 << 20
TOO_MANY_DAYS, NO_DAYS = 2**31 - 1, -2**31


@pytest.fixture
def read(tmp_path):
    """Write a table and read it."""
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def read(table, limit=PLENTY, **options):
        parquet.write_table(table, tmp_path / "a.parquet", **options)
        return read_file(DataFile("a.parquet", tmp_path / "a.parquet"), limit)

    return read


def test_rows(read):
    import pyarrow

    chats = [[{"role": "user", "content": "Hi?"}], None]
    chat, text = read(pyarrow.table({"messages": chats, "text": [None, "plain"]}))
    assert list(chat.content) == chats[0] and chat.where == "a.parquet row 1"
    assert text.content == "plain" and text.where == "a.parquet row 2"
    assert len(read(pyarrow.table({"text": ["x" * 100] * 1000}), 20_000)) == 200


def test_only_text_is_looked_at(read):
    import pyarrow

    days = pyarrow.array([TOO_MANY_DAYS, NO_DAYS], pyarrow.int32()).view(pyarrow.date32())
    found = read(pyarrow.table({"text": ["a", "b"], "prompt": days, "context": [1, 2], "day": days}))
    assert [one.content for one in found] == ["a", "b"]
    turns = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user", "user"]), pyarrow.array(["hi", "ho"]), days], ["role", "content", "day"])
    chats = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2], pyarrow.int32()), turns)
    found = read(pyarrow.table({"messages": chats}))
    assert [one.content for one in found] == [({"role": "user", "content": text},) for text in ("hi", "ho")]


@pytest.mark.parametrize("name", ["text", "prompt", "x"])
def test_a_file_without_a_column_of_text(read, name):
    import pyarrow

    days = pyarrow.array([TOO_MANY_DAYS, NO_DAYS], pyarrow.int32()).view(pyarrow.date32())
    with pytest.raises(CalibrationError, match="no column of text that is known") as caught:
        read(pyarrow.table({name: days}))
    assert f"{name} (date32[day])" in caught.value.why


def test_text_that_is_not_utf8(read):
    import pyarrow

    parts = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    with pytest.raises(CalibrationError, match="can't be read as parquet") as caught:
        read(pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 1, parts)}))
    assert "utf-8" in caught.value.why and caught.value.next


def repeated(text, times):
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()),
                                               pyarrow.array([text]))


def test_a_small_file_of_gigabytes(read, monkeypatch):
    """What it says 64 times is stored once. It is read as far as it is needed, or not at all."""
    import pyarrow

    table = pyarrow.table({"text": repeated("x" * (4 << 20), 64)})
    (first,) = read(table, 1000, compression="zstd")
    assert len(first.content) == 4 << 20
    turns = pyarrow.ListArray.from_arrays(pyarrow.array([0, 4096], pyarrow.int32()),
                                          repeated("x" * (4 << 20), 4096))
    monkeypatch.setattr(module, "MEMORY", 3 * 2**30)
    with pytest.raises(CalibrationError, match="can't be read as parquet"):
        read(pyarrow.table({"conversation": turns}), 1000, compression="zstd")


def test_what_is_no_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 5)
    for path in (tmp_path / "a.parquet", tmp_path / "none.parquet", tmp_path):
        with pytest.raises(CalibrationError, match="can't be read as parquet") as caught:
            module.read_rows(path, "a.parquet", ["text"], PLENTY)
        assert caught.value.why and caught.value.next


def test_without_pyarrow_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "has_pyarrow", lambda: False)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(CalibrationError, match="needs pyarrow") as caught:
        read_file(DataFile("a.parquet", tmp_path / "a.parquet"), PLENTY)
    assert "pip install pyarrow" in caught.value.next
