from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from quantkit.checkpoint.shards import (
    DTYPES,
    StoredTensor,
    shard_chunks,
    shard_names,
    split,
    stored_tensors,
    tensor_chunks,
)
from quantkit.support.errors import CheckpointError

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
contents = st.dictionaries(st.text("abc.é", min_size=1, max_size=6),
                           st.tuples(st.sampled_from(sorted(DTYPES)), shapes), min_size=1, max_size=6)


def make(spec):
    random = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, 2, shape, generator=random).to(DTYPES[code])
            for name, (code, shape) in spec.items()}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(contents)
def test_the_safetensors_library_reads_what_we_stream(tmp_path_factory, spec):
    folder = tmp_path_factory.mktemp("shards")
    tensors = make(spec)
    part = folder / "part.safetensors"
    part.write_bytes(b"".join(tensor_chunks(tensors)))
    stored = stored_tensors(part)
    whole = folder / "whole.safetensors"
    whole.write_bytes(b"".join(shard_chunks(stored)))
    for file in (part, whole):
        found = load_file(file)
        assert found.keys() == tensors.keys() and all(same(found[n], t) for n, t in tensors.items())
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
        for tensor in stored_tensors(file):  # mapped readers need each aligned to its dtype
            assert tensor.offset % DTYPES[tensor.code].itemsize == 0


def test_views_and_transposes_are_written_as_they_look(tmp_path):
    tensors = {"t": torch.arange(12.0).reshape(3, 4).T, "v": torch.arange(10)[3:7]}
    (tmp_path / "x.safetensors").write_bytes(b"".join(tensor_chunks(tensors)))
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[n], t) for n, t in tensors.items())


def test_a_dtype_that_the_format_lacks_is_named():
    with pytest.raises(CheckpointError, match=r"tensor odd has dtype torch\.complex64"):
        list(tensor_chunks({"odd": torch.zeros(1, dtype=torch.complex64)}))


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 40))
def test_shards_keep_order_and_stay_below_the_limit(sizes, limit):
    tensors = [StoredTensor(str(i), "U8", (n,), n, None, 0) for i, n in enumerate(sizes)]
    shards = split(tensors, limit)
    assert [t for shard in shards for t in shard] == tensors
    assert all(len(s) == 1 or sum(t.nbytes for t in s) <= limit for s in shards if s)
    assert all(shards) or len(shards) == 1


def test_shard_names():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
