"""Calibration data, mutated: JSON lines, text and parquet are read or refused with the file and the line."""

from __future__ import annotations

import io
import json

import pytest

from quantkit.quantization.calibration.files import DataFile, read_file

ROWS = [{"text": "plain é"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "c", "output": "b"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}]


def reader(tmp_path, name):
    def read(data):
        (tmp_path / name).write_bytes(data)
        for one in read_file(DataFile(name, tmp_path / name), 1 << 16):
            assert all(text.encode() for text in ([one.content] if isinstance(one.content, str) else
                                                  [turn["role"] for turn in one.content]))
    return read


def lines(rows):
    return b"\n".join(json.dumps(row).encode() for row in rows)


def test_json_lines(fuzz, mutations, tmp_path):
    def mutate(data, chance):
        if chance.random() < 0.5:
            return mutations["bytes"](data, chance)
        rows = [json.loads(line) for line in data.split(b"\n")]
        number = chance.randrange(len(rows))
        return lines([*rows[:number], mutations["json"](rows[number], chance), *rows[number + 1:]])

    fuzz(reader(tmp_path, "a.jsonl"), [lines(ROWS), *(lines([row]) for row in ROWS)], mutate)


def test_text(fuzz, mutations, tmp_path):
    fuzz(reader(tmp_path, "a.txt"), ["\ufeffnaïve 日本\n".encode() * 20], mutations["bytes"])


def test_parquet(fuzz, mutations, tmp_path):
    """Few cases: each is a process."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def written(table, **options):
        out = io.BytesIO()
        parquet.write_table(table, out, **options)
        return out.getvalue()

    chats = pyarrow.table({"messages": [ROWS[1]["messages"]] * 40, "day": pyarrow.array(
        [0, 1] * 20, pyarrow.int32()).view(pyarrow.date32())})
    texts = pyarrow.table({"text": pyarrow.array(["a", "é" * 50] * 20).dictionary_encode(), "x": [1, 2] * 20})
    fuzz(reader(tmp_path, "a.parquet"), [written(chats), written(texts), written(texts, compression="zstd")],
         mutations["bytes"], cases=30)
