"""Damage is found when a checkpoint is loaded: all of it in a small one, in places in a large one."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint import integrity
from quantkit.checkpoint.integrity import BlockHashes, check_files, check_sample
from quantkit.checkpoint.manifest import BLOCK, BLOCK_DIGITS, FileRecord, Manifest, _canonical
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import stored_tensors
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.export.layouts import export
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError, UsageError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of several blocks."""
    folder = tmp_path_factory.mktemp("made")
    tiny_model(folder / "source", hidden_size=256, intermediate_size=1024, vocab_size=8192)
    return quantize(str(folder / "source"), "int8", folder / "out").out


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def flip(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def test_blocks_are_hashed_as_they_pass(made):
    raw = (made / "model.safetensors").read_bytes()
    record = Checkpoint.open(made).manifest.files["model.safetensors"]
    assert record.block_count == -(-len(raw) // BLOCK) > 3
    for index in range(record.block_count):
        digest = hashlib.sha256(raw[index * BLOCK:(index + 1) * BLOCK]).hexdigest()
        assert record.blocks[index * BLOCK_DIGITS:(index + 1) * BLOCK_DIGITS] == digest[:BLOCK_DIGITS]


@pytest.mark.parametrize("sizes", [[], [1], [BLOCK], [BLOCK, 1], [BLOCK - 1, 2], [3 * BLOCK + 5, 0, 7]])
def test_chunks_of_any_size(sizes):
    raw = torch.randint(256, (sum(sizes),), dtype=torch.uint8).numpy().tobytes()
    at, chunks = 0, []
    for size in sizes:
        chunks.append(raw[at:at + size])
        at += size
    hashes = BlockHashes()
    assert b"".join(hashes.of(chunks)) == raw
    assert hashes.digits() == "".join(hashlib.sha256(raw[i:i + BLOCK]).hexdigest()[:BLOCK_DIGITS]
                                      for i in range(0, len(raw), BLOCK))


def test_a_whole_checkpoint_loads(made):
    assert load(str(made)).label == load(str(made), verify=True).label


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_byte_of_a_small_model_is_found_when_it_is_loaded(copy, place):
    file = copy / "model.safetensors"
    tensors = sorted(stored_tensors(file), key=lambda tensor: tensor.offset)
    tensor = tensors[{"first": 0, "middle": len(tensors) // 2, "last": -1}[place]]
    flip(file, tensor.offset + tensor.nbytes // 2)
    assert not verify(copy).ok
    for full in (False, True):
        with pytest.raises(CheckpointError, match="is damaged") as caught:
            load(str(copy), verify=full)
        assert str(file) in caught.value.what
        named = caught.value.what.partition(", tensor")[2]
        first, _, last = named.removeprefix("s").strip().removesuffix(", is damaged").partition(" to ")
        names = [tensor.name for tensor in tensors]
        assert names.index(first) <= names.index(tensor.name) <= names.index(last or first)
        assert f"quantkit verify {copy}" in caught.value.next
        assert "quantkit quantize source --recipe int8 --out OUT" in caught.value.next


def test_a_flipped_byte_of_a_small_file_is_found(copy):
    flip(copy / "tokenizer.json", 10)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        load(str(copy))


def test_an_edited_model_card_is_no_damage(copy):
    (copy / "README.md").write_text("mine")
    for full in (False, True):
        load(str(copy), verify=full)


def test_a_large_model_is_checked_in_a_bounded_number_of_places(copy, monkeypatch):
    read = []
    intact = integrity._is_intact
    monkeypatch.setattr(integrity, "_is_intact", lambda path, record, index: (
        read.append(index), intact(path, record, index))[1])
    with Checkpoint.open(copy) as checkpoint:
        count = checkpoint.manifest.files["model.safetensors"].block_count
        small = sum(record.bytes for name, record in checkpoint.manifest.files.items()
                    if not name.endswith((".safetensors", ".md")))
        check_sample(checkpoint, small + 2 * BLOCK)
        first = read.copy()
        check_sample(checkpoint, small + 2 * BLOCK)
    assert first == [0, count // 2] and read == 2 * first, "at even distances, and always the same"


def sizes(folder):
    """Bytes of what is checked, by file."""
    with Checkpoint.open(folder) as checkpoint:
        return {name: record.bytes for name, record in checkpoint.manifest.files.items()
                if name != "README.md"}


def test_the_last_block_of_a_checkpoint_that_a_sample_just_holds_is_looked_at(copy):
    file = copy / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    with Checkpoint.open(copy) as checkpoint, pytest.raises(CheckpointError, match="is damaged"):
        check_sample(checkpoint, sum(sizes(copy).values()))


def test_all_of_several_weight_files_that_a_sample_just_holds_is_looked_at(made, tmp_path, monkeypatch):
    monkeypatch.setitem(CheckpointWriter.__init__.__kwdefaults__, "shard_bytes", BLOCK // 2)
    folder = quantize(str(made.parent / "source"), "int8", tmp_path / "out").out
    weights = sorted(folder.glob("*.safetensors"))
    assert len(weights) > 2
    for file in weights:
        size = file.stat().st_size
        begin = min(tensor.offset for tensor in stored_tensors(file))
        for at in ((begin + size) // 2, size - 1):
            flip(file, at)
            with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match="is damaged"):
                check_sample(checkpoint, sum(sizes(folder).values()))
            flip(file, at)


@pytest.mark.parametrize("beside", [0, BLOCK])
def test_a_file_that_isnt_weights_is_read_whole_however_large(copy, beside):
    largest = max((size, name) for name, size in sizes(copy).items() if not name.endswith(".safetensors"))[1]
    others = sum(size for name, size in sizes(copy).items() if not name.endswith(".safetensors"))
    flip(copy / largest, 10)
    with Checkpoint.open(copy) as checkpoint, pytest.raises(CheckpointError, match="is damaged"):
        check_sample(checkpoint, others + beside)


def test_damage_that_a_sample_misses_is_found_by_checking_all(copy):
    flip(copy / "model.safetensors", BLOCK + 5)
    with Checkpoint.open(copy) as checkpoint:
        check_sample(checkpoint, BLOCK)
        with pytest.raises(CheckpointError, match="tensor"):
            check_files(checkpoint)


def test_progress_counts_all_bytes(made):
    seen = []
    with Checkpoint.open(made) as checkpoint:
        check_files(checkpoint, seen.append)
    assert [event.done for event in seen] == sorted(event.done for event in seen)
    assert seen[-1].done == seen[-1].total == 3


def test_without_hashes_of_blocks_only_all_bytes_are_checked(made, copy):
    manifest = Manifest.from_bytes((made / "quantkit.json").read_bytes())
    files = {name: record.model_copy(update={"blocks": ""}) for name, record in manifest.files.items()}
    raw = manifest.model_copy(update={"files": files}).to_bytes()
    assert b'"blocks"' not in raw and Manifest.from_bytes(raw).to_bytes() == raw
    (copy / "quantkit.json").write_bytes(raw)
    load(str(copy), device="cpu", verify=True)
    weights = copy / "model.safetensors"
    flip(weights, weights.stat().st_size - 1)
    load(str(copy), device="cpu")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(str(copy), device="cpu", verify=True)


def test_an_export_is_made_anew_by_exporting(made, tmp_path):
    out = export(str(made), "gptq", tmp_path / "out").out
    flip(out / "model.safetensors", (out / "model.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError) as caught:
        load(str(out))
    assert "quantkit export out …" in caught.value.next


@pytest.mark.parametrize("blocks", ["00", "0" * (BLOCK_DIGITS - 1), "g" * BLOCK_DIGITS,
                                    "0" * 2 * BLOCK_DIGITS])
def test_a_record_whose_blocks_are_not_those_of_its_size_is_refused(made, blocks):
    with pytest.raises(ValueError):
        FileRecord(sha256="0" * 64, bytes=BLOCK, blocks=blocks)
    plain = json.loads((made / "quantkit.json").read_bytes()) | {"digest": ""}
    plain["files"]["model.safetensors"]["blocks"] = blocks
    raw = _canonical(plain | {"digest": hashlib.sha256(_canonical(plain)).hexdigest()})
    with pytest.raises(CheckpointError, match="is damaged"):
        Manifest.from_bytes(raw)


def test_only_what_has_hashes_can_be_verified(tmp_path):
    with pytest.raises(UsageError, match="can't be verified") as caught:
        load(str(tiny_model(tmp_path / "plain")), verify=True)
    assert "leave out --verify" in caught.value.next
