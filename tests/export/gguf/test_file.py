from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.export.gguf.file import FileTensor, header_bytes
from quantkit.sources.gguf_header import open_gguf

VALUES = st.one_of(st.booleans(), st.integers(0, 2**32 - 1), st.floats(width=32, allow_nan=False), st.text(),
                   st.lists(st.text(), min_size=1, max_size=5),
                   st.lists(st.integers(-2**31, 2**31 - 1), min_size=1, max_size=5),
                   st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5))


def written(path, metadata, tensors):
    path.write_bytes(header_bytes(metadata, tensors)
                     + b"".join(bytes([number]) * tensor.nbytes + bytes(tensor.padding)
                                for number, tensor in enumerate(tensors)))
    return path


@settings(max_examples=60)
@given(st.dictionaries(st.text("abc.", min_size=1, max_size=20).map("x.{}".format), VALUES, max_size=6))
def test_keys_come_back(tmp_path_factory, metadata):
    path = written(tmp_path_factory.mktemp("m") / "m.gguf", metadata, [FileTensor("t", "F32", (2,))])
    header, _ = open_gguf(path)
    assert header.metadata == metadata
    assert {key: type(value) for key, value in header.metadata.items()} == {
        key: type(value) for key, value in metadata.items()}


def test_tensors_lie_where_the_header_says(tmp_path):
    tensors = [FileTensor("a", "F32", (3,)), FileTensor("b", "Q8_0", (5, 64)),
               FileTensor("c", "Q4_K", (2, 256)), FileTensor("d", "BF16", (2, 3, 5))]
    path = written(tmp_path / "m.gguf", {"general.architecture": "llama", "general.name": "ä"}, tensors)
    header, data = open_gguf(path)
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for number, tensor in enumerate(tensors):
        mine, other = header.tensors[tensor.name], theirs[tensor.name]
        assert mine.shape == tensor.shape and mine.nbytes == tensor.nbytes == other.n_bytes
        assert other.tensor_type.name == tensor.kind and other.data_offset == mine.offset
        assert set(data[mine.offset:mine.offset + mine.nbytes]) == {number} and not mine.offset % 32
    assert path.stat().st_size == sum(tensor.nbytes + tensor.padding for tensor in tensors) + theirs[
        "a"].data_offset


@pytest.mark.parametrize("value", [-1, 2**32])
def test_numbers_without_a_place(value):
    with pytest.raises(struct.error):
        header_bytes({"a": value}, [])


def test_lists_of_numbers_are_those_that_llama_cpp_reads(tmp_path):
    lists = {"tokenizer.ggml.token_type": [1, 3], "tokenizer.ggml.scores": [-1.5, 0.0]}
    path = written(tmp_path / "m.gguf", lists, [FileTensor("t", "F32", (1,))])
    fields = GGUFReader(path).fields
    assert [kind.name for kind in fields["tokenizer.ggml.token_type"].types] == ["ARRAY", "INT32"]
    assert fields["tokenizer.ggml.scores"].parts[-1].dtype == np.float32
