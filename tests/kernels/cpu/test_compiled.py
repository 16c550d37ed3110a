"""Machine code on disk: made once, never trusted blindly, safe when many make it at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import partial

import pytest

from quantkit_kernels.cpu import compiled, isa
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import I64

X86 = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"
CODE = """
import ctypes
from quantkit_kernels.cpu import compiled, isa
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import I64
def emit(module):
    e = Emitter(module, "twice", [I64], I64)
    e.ret(e.arguments[0] * 2)
print(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address("twice", isa.PLAIN, emit))(21))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    return tmp_path / "cpu"


@pytest.fixture
def twice(monkeypatch):
    """``twice()`` → what the compiled function makes of 21, and how often it was emitted."""
    emitted = []

    def emit(module):
        emitted.append(1)
        e = Emitter(module, "twice", [I64], I64)
        e.ret(e.arguments[0] * 2)

    def run(target=isa.PLAIN):
        monkeypatch.setattr(compiled, "_loaded", {})  # as a process that begins has it
        where = compiled.address("twice", target, emit)
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(where)(21), len(emitted)

    return run


def test_the_second_time_nothing_is_compiled(cache, twice):
    assert twice() == (42, 1) and twice() == (42, 1)
    assert len(list(cache.iterdir())) == 1
    assert cache.stat().st_mode & 0o077 == 0, "others could put code there"


def test_another_instruction_set_is_another_code(cache, twice):
    assert twice() == (42, 1) and twice(isa.Isa("plain", 16)) == (42, 2)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_file_is_compiled_anew(cache, twice, damage):
    twice()
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?" if damage is None else damage)
    assert twice() == (42, 2) and path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, twice):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file"))
    assert twice() == (42, 1) and twice() == (42, 2)


def test_a_process_loads_it_once(cache):
    def emit(module):
        e = Emitter(module, "once", [I64], I64)
        e.ret(e.arguments[0])

    assert compiled.address("once", isa.PLAIN, emit) == compiled.address("once", isa.PLAIN, emit)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no such permissions")
def test_a_file_that_others_may_write_to_is_compiled_anew(cache, twice):
    twice()
    (path,) = cache.iterdir()
    path.chmod(0o666)
    assert twice() == (42, 2) and path.stat().st_mode & 0o077 == 0
    assert twice() == (42, 2)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no such permissions")
def test_a_file_of_somebody_else_is_compiled_anew(cache, twice, monkeypatch):
    twice()
    owner = os.getuid() or 1000
    (path,) = cache.iterdir()
    if not os.getuid():
        os.chown(path, owner, -1)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert twice() == (42, 2)


def test_a_cache_is_used_where_groups_may_write_by_default(cache, twice):
    before = os.umask(0o002)
    try:
        assert twice() == (42, 1) and twice() == (42, 1)
    finally:
        os.umask(before)


def test_a_user_without_a_home_costs_time_only(monkeypatch, twice):
    def homeless(cls):
        raise RuntimeError("Could not determine home directory.")

    for name in ("QUANTKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", classmethod(homeless))
    assert twice() == (42, 1) and twice() == (42, 2)


def test_a_full_disk_leaves_no_half_file(cache, twice, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    assert twice() == (42, 1) and list(cache.iterdir()) == []


def test_many_processes_at_once(cache):
    running = [subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True,
                                env=os.environ | {"QUANTKIT_CACHE": str(cache.parent)}) for _ in range(4)]
    assert [one.communicate(timeout=120)[0].strip() for one in running] == ["42"] * 4
    assert [path.suffix for path in cache.iterdir()] == [".o"]


def test_another_version_of_the_sources_is_another_code(cache, twice, monkeypatch):
    twice()
    monkeypatch.setattr(compiled, "sources_digest", lambda: "others")
    assert twice() == (42, 2)


def test_the_wide_kernels_use_the_instructions_they_are_named_for():
    """This machine may not have them; its compiler does."""
    from quantkit_kernels.cpu import decoders
    from quantkit_kernels.cpu.matmul import Matmul

    for decoder, group, wanted in ((decoders.INT4, 64, "vpdpbusd"), (decoders.INT8, 0, "vpdpwssd"),
                                   (decoders.W8A8, 0, "vpdpbusd"), (decoders.E4M3, 0, "vfmadd231ps"),
                                   (decoders.bf16(isa.VNNI), None, "vfmadd231ps")):
        spec = Matmul(decoder, group)
        text = compiled.assembly(spec.name, isa.VNNI, partial(spec.emit, isa=isa.VNNI), "sapphirerapids",
                                 triple=X86)
        assert wanted in text and "zmm" in text
    spec = Matmul(decoders.BF16, None)
    assert "vdpbf16ps" in compiled.assembly(spec.name, isa.BF16, partial(spec.emit, isa=isa.BF16), "znver4",
                                            triple=X86)
    for spec in (Matmul(decoders.INT4, 64), Matmul(decoders.W8A8, 0)):
        text = compiled.assembly(spec.name, isa.AVX2, partial(spec.emit, isa=isa.AVX2), "haswell", triple=X86)
        assert "vpmaddubsw" in text and "zmm" not in text


def arm_loops(spec, target, cpu):
    """The innermost loops of a kernel for ARM, each a list of instructions."""
    text = compiled.assembly(spec.name, target, partial(spec.emit, isa=target), cpu, triple=ARM)
    lines = [line for raw in text.splitlines() if (line := raw.split("//")[0].strip())]
    places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    spans = [(places[target], i) for i, line in enumerate(lines)
             if line.startswith(("b", "cb", "tb")) and places.get(target := line.split()[-1], i) < i]
    return [lines[first:last + 1] for first, last in spans
            if sum(first <= start and end <= last for start, end in spans) == 1]


@pytest.mark.parametrize(("target", "cpu"), [
    (isa.NEON_BF16, "neoverse-v1"), pytest.param(isa.NEON_BF16, "apple-m2", marks=pytest.mark.slow),
    (isa.NEON, "neoverse-n1")])
def test_loops_for_arm_multiply_with_what_there_is(target, cpu):
    """An instruction is a large part of some loop. The loops that it fills touch the stack for nothing."""
    from quantkit_kernels.cpu import decoders
    from quantkit_kernels.cpu.matmul import Matmul

    table = decoders.int_table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
    wanted = [(decoders.INT4, 64, "sdot", 0.35), (decoders.W8A8, 0, "sdot", 0.5), (table, 32, "tbl", 0.2),
              (decoders.INT8, 0, "smlal", 0.8), (decoders.INT5, 32, "smlal", 0.8),
              (decoders.bf16(target), None, "bfmlal" if target.bf16 else "fmla", 0.4)]
    if target.i8mm:
        wanted += [(decoders.INT4, 64, "smmla", 0.25), (decoders.W8A8, 0, "smmla", 0.35)]
    for decoder, group, name, share in wanted:
        counts = {tuple(loop): sum(line.startswith(name) for line in loop)
                  for loop in arm_loops(Matmul(decoder, group), target, cpu)}
        loop = max(counts, key=lambda lines: counts[lines] / len(lines))
        assert counts[loop] >= share * len(loop), (decoder.name, name)
        assert not any("[sp" in line and "\tq" in line for line in loop), (decoder.name, name)


def test_code_under_another_keys_name_is_compiled_anew(cache, twice):
    twice()
    twice(other := isa.Isa("plain", 16))
    first, second = sorted(cache.iterdir())
    whole = first.read_bytes(), second.read_bytes()
    first.rename(cache / "kept")
    second.rename(first)
    (cache / "kept").rename(second)
    assert (twice()[1], twice(other)[1]) == (3, 4), "each has the digest of its code, under the wrong name"
    assert (first.read_bytes(), second.read_bytes()) == whole
