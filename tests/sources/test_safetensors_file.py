from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from quantkit.sources.safetensors_file import DTYPES, MAX_HEADER, SafetensorsFile, ShardedTensors
from quantkit.support.errors import SourceError


def refused(path: Path, match: str) -> SourceError:
    with pytest.raises(SourceError, match=match) as caught:
        SafetensorsFile(path)
    assert path.name in caught.value.what
    return caught.value


def put(folder: Path, raw: bytes, name: str = "model.safetensors") -> Path:
    (folder / name).write_bytes(raw)
    return folder / name


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text("abc.é_", min_size=1, max_size=6).filter(lambda n: ".." not in n),
                       st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
                       min_size=1, max_size=5), st.integers(0, 9))
def test_reads_what_the_safetensors_library_writes(tmp_path_factory, spec, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randint(0, 2, s, generator=generator).to(DTYPES[d]) for n, (d, s) in spec.items()}
    path = tmp_path_factory.mktemp("f") / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert file.infos.keys() == tensors.keys() and file.metadata == {"format": "pt"}
    for name, wanted in tensors.items():
        found, info = file.tensor(name), file.infos[name]
        assert (info.shape, info.dtype) == (tuple(wanted.shape), wanted.dtype)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert found.reshape(-1).view(torch.uint8).tolist() == wanted.reshape(-1).view(torch.uint8).tolist()
        assert info.nbytes == wanted.numel() * wanted.itemsize


def test_a_tensor_is_a_view_and_outlives_the_file(tmp_path):
    file = SafetensorsFile(put(tmp_path, save({"a": torch.arange(1000.0)})))
    a, again = file.tensor("a"), file.tensor("a")
    assert a.data_ptr() == again.data_ptr()
    file.close()
    assert a[999] == 999
    with pytest.raises(SourceError, match="closed"):
        file.tensor("a")  # memory that nobody wrote would be worse
    with pytest.raises(SourceError, match="no tensor 'b'"):
        file.tensor("b")


@pytest.mark.parametrize("pad", [1, 2, 3])
def test_unaligned_data_is_read(tmp_path, safetensors, pad):
    values = torch.arange(5.0)
    raw = safetensors({"b": ("U8", [pad], b"x" * pad), "a": ("F32", [5], values.numpy().tobytes())})
    assert torch.equal(SafetensorsFile(put(tmp_path, raw)).tensor("a"), values)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x4B50])
def test_a_header_whose_length_looks_like_a_pickle_is_no_pickle(tmp_path, safetensors, length):
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode().ljust(length)
    raw = safetensors({}, header=header) + b"\7"
    assert raw[:2] in (b"\x80\2", b"\x80\3", b"\x80\4", b"PK")
    assert SafetensorsFile(put(tmp_path, raw)).tensor("a").item() == 7


def _zip() -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return raw.getvalue()


@pytest.mark.parametrize("raw,what,next_step", [
    (b"", "empty", "download"), (b"\7", "1 bytes", "download"), (b"\0" * 9, "9 bytes", "download"),
    (b"\0" * 200, "claims 0 bytes", "download"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "LFS pointer", "git lfs pull"),
    (pickle.dumps({"a": list(range(50))}, 2), "pickle", "convert to safetensors"),
    (pickle.dumps({"a": list(range(50))}, 4), "pickle", "convert to safetensors"),
    (_zip(), "pickle", "convert to safetensors"), (b"GGUF" + b"\0" * 60, "GGUF", "rename"),
    (b"<!DOCTYPE html><html><body>Not found</body></html>", "header claims", "download"),
    (struct.pack("<Q", MAX_HEADER + 8) + b"{" * 64, "header claims", "download"),
    (struct.pack("<Q", 2**64 - 1) + b"{}" * 64, "header claims", "download"),
    (struct.pack("<Q", 10) + b"[1, 2, 3] ", "no JSON object", "download"),
    (struct.pack("<Q", 10) + b"{'a': 1}  ", "not JSON", "download"),
])
def test_other_files_are_named(tmp_path, raw, what, next_step):
    assert next_step in (refused(put(tmp_path, raw), what).next or "")


def test_not_a_file(tmp_path):
    refused(tmp_path, "can't be read")
    refused(tmp_path / "none.safetensors", "can't be read")


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize("header,what", [
    ('{"a": %s, "a": %s}', "'a' twice"), ('{"a": {"dtype": "U8", "dtype": "U8"}}', "'dtype' twice"),
    ('{"../../a": %s}', "name"), ('{"a/b": %s}', "name"), ('{"a\\\\b": %s}', "name"), ('{"..": %s}', "name"),
    ('{"a\\u0000": %s}', "name"), ('{"": %s}', "name"), ('{"\\ud800": %s}', "not JSON"),
    ('{"a\\u001b[31m": %s}', "name"), ('{"' + "a" * 513 + '": %s}', "name"),
    ('{"a": %s, "b": %s}', "offset 0, the one before ends at 4"), ("{}", "take 0 bytes, 4 follow"),
    ('{"__metadata__": [], "a": %s}', "__metadata__"), ('{"__metadata__": null, "a": %s}', "__metadata__"),
    ('{"__metadata__": {"a": 1}, "a": %s}', "__metadata__"),
])
def test_a_hostile_header_is_refused(tmp_path, safetensors, header, what):
    raw = safetensors({}, header=header.replace("%s", json.dumps(ENTRY)).encode()) + b"abcd"
    refused(put(tmp_path, raw), what)


@pytest.mark.parametrize("change,what", [
    ({"dtype": "F33"}, "dtype 'F33'"), ({"dtype": 3}, "dtype"), ({"dtype": ["U8"]}, "dtype"),
    ({"shape": [-4]}, "shape"), ({"shape": [4.0]}, "shape"), ({"shape": [True, 4]}, "shape"),
    ({"shape": "4"}, "shape"), ({"shape": [2**62, 4]}, "shape"), ({"shape": [1] * 9}, "shape"),
    ({"shape": [2**40, 2**40]}, "shape"), ({"shape": [0, 2**48, 2**48]}, "shape"),
    ({"shape": [2**64]}, "shape"), ({"shape": [5]}, "takes 5 bytes"), ({"dtype": "F16"}, "takes 8 bytes"),
    ({"data_offsets": [0, 5]}, "lies at"), ({"data_offsets": [4, 0]}, "lies at"),
    ({"data_offsets": [-4, 0]}, "lies at"), ({"data_offsets": [0, 4, 4]}, "lies at"),
    ({"data_offsets": [1, 4], "shape": [3]}, "begins at offset 1"),
    ({"data_offsets": [0, 3], "shape": [3]}, "take 3 bytes, 4 follow"), ({"data_offsets": None}, "lies at"),
    ({"extra": 1}, "exactly"),
])
def test_a_hostile_entry_is_refused_by_name(tmp_path, safetensors, change, what):
    raw = safetensors({}, header=json.dumps({"layer.w": {**ENTRY, **change}}).encode()) + b"abcd"
    error = refused(put(tmp_path, raw), what)
    assert "'layer.w'" in error.what or "follow the header" in error.what


def test_an_empty_tensor_of_odd_shape_is_read(tmp_path, safetensors):
    raw = safetensors({"a": ("F32", [0, 2**40], b""), "b": ("U8", [1], b"x")})
    assert SafetensorsFile(put(tmp_path, raw)).tensor("a").shape == (0, 2**40)


def test_too_many_tensors(tmp_path, safetensors, monkeypatch):
    monkeypatch.setattr("quantkit.sources.safetensors_file.MAX_TENSORS", 3)
    tensors = {f"t{i}": ("U8", [1], b"x") for i in range(4)}
    refused(put(tmp_path, safetensors(tensors)), "lists 4 tensors")


def test_every_truncation_is_refused(tmp_path):
    raw = save({"a": torch.ones(3, 3), "b": torch.ones(2, dtype=torch.bfloat16)})
    for length in range(len(raw)):
        refused(put(tmp_path, raw[:length]), "malformed|JSON")
    refused(put(tmp_path, raw + b"\0"), "follow the header")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255), st.sampled_from("xid")),
                min_size=1, max_size=6))
def test_a_mutated_file_loads_or_is_refused(tmp_path_factory, edits):
    raw = bytearray(save({"a.weight": torch.ones(4, 3), "b": torch.ones(5, dtype=torch.int8)}, {"k": "v"}))
    for at, byte, how in edits:
        at %= len(raw)
        raw[at:at + (how != "i")] = b"" if how == "d" and len(raw) > 1 else bytes([byte])
    path = put(tmp_path_factory.mktemp("m"), bytes(raw))
    try:
        file = SafetensorsFile(path)
    except SourceError as error:
        assert path.name in error.what
    else:
        for name, info in file.infos.items():
            try:
                assert file.tensor(name).shape == info.shape
            except SourceError as error:  # an edit made an infinity of a number
                assert "not finite" in error.what and path.name in error.what


# folders


def shards(folder: Path, index: dict | None = None) -> Path:
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.full((2,), 2.0)}, folder / "model-00002-of-00002.safetensors")
    table = {n: f"model-0000{i}-of-00002.safetensors" for n, i in (("a", 1), ("b", 1), ("c", 2))}
    text = json.dumps({"metadata": {"total_size": 24}, "weight_map": {**table, **(index or {})}})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def folder_refused(folder: Path, match: str) -> SourceError:
    with pytest.raises(SourceError, match=match) as caught:
        ShardedTensors(folder)
    return caught.value


def test_shards_are_one_model(tmp_path):
    model = ShardedTensors(shards(tmp_path))
    assert list(model.files) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert {n: model.tensor(n)[0].item() for n in model.infos} == {"a": 0, "b": 1, "c": 2}
    with pytest.raises(SourceError, match="no tensor 'd'"):
        model.tensor("d")
    model.close()
    with pytest.raises(SourceError, match="closed"):
        model.tensor("a")


@pytest.mark.parametrize("name", [
    "../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0.safetensors", "a\\b", "C:x",
    "x" * 300, "\ud800.safetensors",
])
def test_an_index_names_plain_files_only(tmp_path, name):
    (tmp_path.parent / "x.safetensors").write_bytes(save({"z": torch.ones(1)}))
    error = folder_refused(shards(tmp_path, {"z": name}), "weight file|missing|reached|not JSON")
    assert "folder" in f"{error.why} {error.next}" or "reached" in error.what or "surrogate" in error.why


def test_a_missing_and_a_truncated_shard_are_named(tmp_path):
    second = shards(tmp_path) / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    folder_refused(tmp_path, "00002-of-00002.*malformed")
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    folder_refused(tmp_path, "00002-of-00002.*LFS")
    second.unlink()
    folder_refused(tmp_path, "00002-of-00002.*missing")
    second.mkdir()
    folder_refused(tmp_path, "00002-of-00002.*missing")


def test_links(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "cache" / "snapshots" / "sha"
    outside.mkdir()
    folder.mkdir(parents=True)
    target = shards(folder) / "model-00002-of-00002.safetensors"
    secret = outside / "s.safetensors"
    secret.write_bytes(target.read_bytes())
    target.unlink()
    target.symlink_to(secret)
    folder_refused(folder, "link that leaves")
    target.unlink()
    target.symlink_to("../../blobs/abc")  # as the hub's cache does
    folder_refused(folder, "missing")
    (tmp_path / "cache" / "blobs").mkdir()
    (tmp_path / "cache" / "blobs" / "abc").write_bytes(secret.read_bytes())
    assert ShardedTensors(folder).tensor("c")[0] == 2
    folder.parent.rename(tmp_path / "cache" / "models")  # two levels above another folder is not the hub's
    folder_refused(tmp_path / "cache" / "models" / "sha", "link that leaves")
    (tmp_path / "cache" / "models").rename(folder.parent)
    target.unlink()
    target.symlink_to(target.name)
    folder_refused(folder, "reached|leaves|missing")
    index = folder / "model.safetensors.index.json"
    (outside / "i.json").write_text(index.read_text())
    index.unlink()
    index.symlink_to(outside / "i.json")
    folder_refused(folder, "link that leaves")


def test_index_and_shards_must_agree(tmp_path):
    folder_refused(shards(tmp_path, {"d": "model-00001-of-00002.safetensors"}), "'d' in .*doesn't hold it")
    folder_refused(shards(tmp_path, {"a": "model-00002-of-00002.safetensors"}), "'a' in .*00002.*hold it")
    save_file({"b": torch.ones(2), "c": torch.ones(2)}, shards(tmp_path) / "model-00002-of-00002.safetensors")
    folder_refused(tmp_path, "'b' is in .*00001.* and in .*00002")


@pytest.mark.parametrize("text,what", [
    ('{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"), ('{"weight_map": {}}', "weight_map"),
    ('{"weight_map": {"a": 3}}', "weight_map"), ('{"weight_map": []}', "weight_map"), ("{}", "weight_map"),
    ("[]", "list"), ("", "not JSON"),
])
def test_a_malformed_index(tmp_path, text, what):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    folder_refused(tmp_path, what)


def test_two_models_in_one_folder_are_ambiguous(tmp_path):
    save_file({"a": torch.ones(1)}, shards(tmp_path) / "model.safetensors")
    folder_refused(tmp_path, "index that doesn't name it")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert list(ShardedTensors(tmp_path).infos) == ["a"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert list(ShardedTensors(tmp_path).infos) == ["a"]


def test_no_weights(tmp_path):
    assert "download" in (folder_refused(tmp_path, "no weights").next or "")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    assert "convert to safetensors" in (folder_refused(tmp_path, "pickle: pytorch_model.bin").next or "")


def test_the_same_seeded_noise_never_loads(tmp_path):
    noise = random.Random(0)
    for _ in range(50):
        refused(put(tmp_path, struct.pack("<Q", 64) + b"{" + noise.randbytes(100)), "JSON")
