from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.sources import gguf_header
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.gguf_header import open_gguf
from quantkit.support.errors import SourceError

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
HUGE = 2**63


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def info(name: str | bytes, dims=(4,), kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims) if count is None else count, *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def gguf(pairs=(), infos=(), data: bytes = b"", *, version: int = 3, tensors: int | None = None,
         keys: int | None = None, alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos) if tensors is None else tensors,
                                 len(pairs) if keys is None else keys) + b"".join([*pairs, *infos])
    return head + b"\0" * (-len(head) % alignment) + data


def put(folder: Path, raw: bytes) -> Path:
    (folder / "x.gguf").write_bytes(raw)
    return folder / "x.gguf"


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(tmp_path, version):
    pairs = [pair("s", STRING, text("é")), pair("u", U32, struct.pack("<I", 7)), pair("b", BOOL, b"\2"),
             pair("f", F32, struct.pack("<f", 0.5)), pair("i", 1, b"\xff"), pair("e", ARRAY, array(F32, 0)),
             pair("l", ARRAY, array(STRING, 2, text("a") + text("b"))),
             pair("n", ARRAY, array(U8, 3, b"\1\2\3")),
             pair("w", U64, struct.pack("<Q", 2**63)), pair("d", 12, struct.pack("<d", 1e300)),
             pair("aa", ARRAY, array(ARRAY, 2, array(U8, 1, b"\5") + array(STRING, 1, text("z"))))]
    raw = gguf(pairs, [info("t", (2, 3)), info("q", (32, 2), 8, 32)], b"\0" * (32 + 68), version=version)
    header, _ = open_gguf(put(tmp_path, raw))
    assert header.metadata == {"s": "é", "u": 7, "f": 0.5, "b": True, "l": ["a", "b"], "n": [1, 2, 3],
                               "e": [], "i": -1, "w": 2**63, "d": 1e300, "aa": [[5], ["z"]]}
    assert header.metadata["b"] is True and header.version == version
    t, q = header.tensors["t"], header.tensors["q"]
    assert (t.shape, t.nbytes, q.shape, q.nbytes) == ((3, 2), 24, (2, 32), 68)
    assert q.offset == t.offset + 32 == len(raw) - 68


def test_agrees_with_the_gguf_library(smollm2):
    import gguf

    from quantkit.sources.open import open_source

    path = open_source(smollm2).path
    header, data = open_gguf(path)
    reader = gguf.GGUFReader(str(path))
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(d) for d in reversed(tensor.shape))
        assert (ours.type, ours.offset, ours.nbytes) == (
            int(tensor.tensor_type), tensor.data_offset, tensor.n_bytes)
    assert data[:4] == b"GGUF"


def crafted() -> bytes:
    """49 bytes that keep gguf 0.19's reader busy for ever: an array of 2⁶³ numbers."""
    raw = gguf([pair("a", ARRAY, array(U8, HUGE))], alignment=1)
    assert len(raw) == 49
    return raw


HOSTILE = {
    "49 bytes": (crafted(), "key 'a', offset 49: a count of 9223372036854775808"),
    "nested": (gguf([pair("a", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(U8, 1, b"x"))))]), "nesting 2"),
    "many keys": (gguf(keys=HUGE), "the header, offset 24: a count"),
    "more tensors than bytes": (gguf(tensors=3, data=bytes(40)), "a count of 3"),
    "more numbers than bytes": (gguf([pair("a", ARRAY, array(U64, 100))]), "key 'a'.*a count of 100"),
    "many tensors": (gguf(tensors=HUGE), "a count of"),
    "long string": (gguf([pair("a", STRING, struct.pack("<Q", HUGE))]), "a string of"),
    "string past the end": (gguf([pair("a", STRING, struct.pack("<Q", 1000))]), "1000 bytes are claimed"),
    "long key": (gguf([pair("k" * 513, U8, b"1")]), "a metadata key.* a string of 513"),
    "key not UTF-8": (gguf([pair(b"\xff", U8, b"1")]), "not UTF-8"),
    "key twice": (gguf([pair("k", U8, b"1"), pair("k", U8, b"2")]), "key 'k'.*twice"),
    "unknown type": (gguf([pair("k", 13, b"1")]), "value type 13"),
    "unknown inner type": (gguf([pair("k", ARRAY, array(99, 1, b"\0" * 64))]), "value type 99"),
    "version": (gguf(version=4), "version 4"), "big endian": (gguf(version=0x03000000), "big-endian"),
    "alignment 33": (gguf([pair("general.alignment", U32, struct.pack("<I", 33))]), "alignment of 33"),
    "alignment 0": (gguf([pair("general.alignment", U32, bytes(4))]), "alignment of 0"),
    "alignment type": (gguf([pair("general.alignment", STRING, text("32"))]), "uint32"),
    "tensor twice": (gguf(infos=[info("t"), info("t", offset=32)], data=bytes(64)), "tensor 't'.*twice"),
    "no dims": (gguf(infos=[info("t", ())], data=bytes(64)), "shape"),
    "5 dims": (gguf(infos=[info("t", (1,) * 5)], data=bytes(64)), "a count of 5"),
    "huge dims count": (gguf(infos=[info("t", count=2**32 - 1)], data=bytes(64)), "a count of"),
    "zero dim": (gguf(infos=[info("t", (0, 4))], data=bytes(64)), "shape"),
    "huge dims": (gguf(infos=[info("t", (2**63, 2**63))], data=bytes(64)), "shape"),
    "part of a block": (gguf(infos=[info("t", (33,), 8)], data=bytes(64)), "shape"),
    "unknown ggml type": (gguf(infos=[info("t", (4,), 999)], data=bytes(64)), "type 999"),
    "unaligned": (gguf(infos=[info("t", (4,), 0, 1)], data=bytes(64)), "not aligned"),
    "far away": (gguf(infos=[info("t", (4,), 0, 2**63)], data=bytes(64)), "absurd"),
    "past the end": (gguf(infos=[info("t", (4,), 0, 64)], data=bytes(64)), "tensor 't'.*truncated"),
    "overlap": (gguf(infos=[info("t", (16,)), info("u", (4,), 0, 32)], data=bytes(64)), "'u'.*overlaps"),
    "empty": (b"", "not a GGUF file\nit is empty"), "magic": (b"GGML" + bytes(60), "not a GGUF"),
    "only magic": (b"GGUF", "claimed"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path, name):
    raw, what = HOSTILE[name]
    path = put(tmp_path, raw)
    for reader in (open_gguf, lambda p: GGUFSource(p, str(p))):
        with pytest.raises(SourceError, match=what) as caught:
            reader(path)
        assert "x.gguf" in caught.value.what and caught.value.next


def test_arrays_are_capped_together(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_VALUES", 10)
    pairs = [pair(name, ARRAY, array(U8, 6, b"x" * 6)) for name in "ab"]
    with pytest.raises(SourceError, match=r"key 'b'.* more than 10 values"):
        open_gguf(put(tmp_path, gguf(pairs)))
    monkeypatch.setattr(gguf_header, "MAX_HEADER", 50)
    with pytest.raises(SourceError, match="larger than 50"):
        open_gguf(put(tmp_path, gguf(pairs[:1])))


def test_not_a_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(SourceError, match="can't be read"):
            open_gguf(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    from gguf import GGMLQuantizationType as Q

    pairs = [pair("general.architecture", STRING, text("llama")),
             pair("llama.block_count", U32, struct.pack("<I", 1)),
             pair("tokens", ARRAY, array(STRING, 3, text("a") + text("b") + text("c"))),
             pair("scores", ARRAY, array(F32, 3, bytes(12)))]
    infos = [info("token_embd.weight", (32, 4), int(Q.Q8_0)), info("output_norm.weight", (8,), 0, 160)]
    return gguf(pairs, infos, bytes(192))


def test_every_truncation_is_refused(tmp_path, whole):
    open_gguf(put(tmp_path, whole))
    for length in range(len(whole)):
        with pytest.raises(SourceError):
            open_gguf(put(tmp_path, whole[:length]))


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255), st.sampled_from("xid")), min_size=1,
                      max_size=6))
def test_a_mutated_file_loads_or_is_refused(tmp_path_factory, whole, edits):
    raw = bytearray(whole)
    for at, byte, how in edits:
        at %= len(raw)
        raw[at:at + (how != "i")] = b"" if how == "d" else bytes([byte])
    path = put(tmp_path_factory.mktemp("m"), bytes(raw))
    try:
        header, _ = open_gguf(path)
    except SourceError as error:
        assert "x.gguf" in error.what
    else:
        assert all(t.offset + t.nbytes <= len(raw) for t in header.tensors.values())
    with pytest.raises(SourceError):  # it was never a model
        GGUFSource(path, str(path))
