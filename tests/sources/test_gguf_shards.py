"""Models in several files: split by the gguf library, put together again by names alone."""

from __future__ import annotations

import hashlib
import shutil
import struct

import pytest
import torch

from quantkit.runtime.loader import load
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.gguf_shards import COUNT, NUMBER, TENSORS
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError
from tests.helpers.gguf_models import write_model


@pytest.fixture
def shards(tmp_path):
    """Three files of a mixture of experts, and its weights."""
    weights = write_model(tmp_path / "m.gguf", "mixtral", shards=3)[1]
    paths = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    assert sorted(tmp_path.iterdir()) == paths
    return paths, weights


def rewritten(path, key: str, form: str, value: int) -> None:
    """Change a number of the metadata in place."""
    content, at = path.read_bytes(), path.read_bytes().index(key.encode()) + len(key) + 4
    path.write_bytes(content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form):])


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_file_opens_all(shards, given):
    paths, weights = shards
    source = open_source(str(paths[given]))
    assert set(source.tensors()) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(source.tensor(name), weight), name
    assert "tokenizer.json" in source.side_files()
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    source.release()
    source.close()
    assert source.identity().files == hashes


@pytest.mark.oracle
def test_llama_cpp_reads_the_same_files(shards, llama_cpp):
    paths = shards[0]
    ids = torch.randint(4, 200, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with llama_cpp(paths[0]) as session:
        theirs = session.predict(ids, 0).logits
    with torch.no_grad():
        ours = load(str(paths[1]), dtype="float32").model(torch.tensor([ids[:-1]]))[0].float()
    assert (ours - theirs).abs().max() < 0.01 * theirs.std()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_file_is_named(shards, number):
    paths = shards[0]
    paths[number].unlink()
    with pytest.raises(SourceError, match=f"{paths[number].name} is missing") as caught:
        GGUFSource(paths[(number + 1) % 3], "m.gguf")
    assert "3 files" in caught.value.why and caught.value.next


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_truncated_file_is_named(shards, number):
    paths = shards[0]
    paths[number].write_bytes(paths[number].read_bytes()[:-64])
    with pytest.raises(SourceError, match=f"{paths[number].name} is malformed.*truncated"):
        GGUFSource(paths[0], "m.gguf")


def test_a_file_at_another_s_place_is_named(shards):
    paths = shards[0]
    shutil.copy(paths[1], paths[2])
    with pytest.raises(SourceError, match=f"{paths[2].name} isn't the file that its name says") as caught:
        GGUFSource(paths[0], "m.gguf")
    assert "1 of 3, counted from 0, and not 2 of 3" in caught.value.why


def test_a_tensor_that_is_there_twice(shards):
    paths = shards[0]
    shutil.copy(paths[1], paths[2])
    rewritten(paths[2], NUMBER, "<H", 2)
    with pytest.raises(SourceError, match=f"{paths[2].name} has a tensor 'blk") as caught:
        GGUFSource(paths[0], "m.gguf")
    assert f"{paths[1].name} has it too" in caught.value.why


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_of_another_model(shards, tmp_path, family):
    paths = shards[0]
    write_model(tmp_path / "other.gguf", family, shards=3)
    shutil.copy(tmp_path / "other-00002-of-00003.gguf", paths[1])
    with pytest.raises(SourceError, match=f"{paths[1].name} belongs to another model than {paths[0].name}"):
        GGUFSource(paths[0], "m.gguf")


def test_fewer_tensors_than_the_files_say(shards):
    paths = shards[0]
    for path in paths:
        rewritten(path, TENSORS, "<i", 1000)
    with pytest.raises(SourceError, match="tensors") as caught:
        GGUFSource(paths[2], "m.gguf")
    assert "1000" in caught.value.why


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00002.gguf", "m-00000-of-00003.gguf",
                                  "m-00004-of-00003.gguf", "-00001-of-00003.gguf", "m-1-of-3.gguf"])
def test_a_name_that_doesn_t_say_which(shards, name):
    path = shards[0][0].rename(shards[0][0].with_name(name))
    with pytest.raises(SourceError, match="doesn't say which") as caught:
        GGUFSource(path, "m.gguf")
    assert "NAME-00001-of-00003.gguf" in caught.value.why


def test_a_number_of_files_that_can_t_be(shards):
    for path in shards[0]:
        rewritten(path, COUNT, "<H", 2**16 - 1)
    with pytest.raises(SourceError, match="one of 65535 files"):
        GGUFSource(shards[0][0], "m.gguf")


def test_a_part_that_is_a_folder(shards):
    shards[0][1].unlink()
    shards[0][1].mkdir()
    with pytest.raises(SourceError, match="is missing"):
        GGUFSource(shards[0][0], "m.gguf")


def test_a_single_file_that_says_so(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", shards=1)
    source = GGUFSource(tmp_path / "m.gguf", "m.gguf")
    assert list(source.identity().files) == ["m.gguf"]
