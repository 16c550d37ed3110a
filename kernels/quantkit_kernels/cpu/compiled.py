"""From emitted modules to machine code, kept on disk: a kernel is compiled once per machine and version."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir

from quantkit_kernels.cpu.isa import Isa, host_features
from quantkit_kernels.kept import cache_folder, is_ours

DIGEST = 32
_loaded: dict[str, tuple[int, Any]] = {}
"""Addresses in this process, and the libraries that they are in."""
_lock = threading.Lock()
_numbers = itertools.count()


def address(name: str, isa: Isa, emit: Callable[[ir.Module], None]) -> int:
    """The address of a compiled function; its code is in memory once, until the process ends.

    Args:
        name: the function's name; it must say everything that ``emit`` depends on besides the instruction
            set.
        isa: the instruction set that it was written for.
        emit: writes the function ``name`` into a module. Called only if the machine code isn't on disk.

    Raises:
        RuntimeError: LLVM refuses the module: a defect of the kernel.
    """
    key = _key(name, isa)
    with _lock:
        if key not in _loaded:
            code = _read(key)
            if code is None:
                module = ir.Module(name)
                module.triple = _llvm().get_default_triple()
                emit(module)
                code = _compile(module)
                _write(key, code)
            _loaded[key] = _load(code, name)
        return _loaded[key][0]


def on_disk(name: str, isa: Isa) -> bool:
    """Whether :func:`address` has nothing to compile."""
    return (key := _key(name, isa)) in _loaded or _read(key) is not None


def assembly(name: str, isa: Isa, emit: Callable[[ir.Module], None], cpu: str, features: str = "", *,
             triple: str = "") -> str:
    """What a CPU would run: its assembly, whether or not this machine has such a CPU.

    Args:
        name, isa, emit: as for :func:`address`.
        cpu, features: as LLVM names them.
        triple: the machine's triple; this one's by default.
    """
    _llvm().initialize_all_targets()
    _llvm().initialize_all_asmprinters()
    module = ir.Module(name)
    module.triple = triple or _llvm().get_default_triple()
    emit(module)
    parsed, machine = _optimized(module, cpu, features)
    text: str = machine.emit_assembly(parsed)
    return text


def _key(name: str, isa: Isa) -> str:
    llvm = _llvm()
    parts = (name, isa.name, str(isa.lanes), sources_digest(), repr(llvm.llvm_version_info),
             llvm.get_default_triple(), llvm.get_host_cpu_name(),
             ",".join(sorted(name for name, present in host_features().items() if present)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


@functools.cache
def sources_digest() -> str:
    """A digest of this package: another version compiles, and packs weights, anew."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(key: str) -> bytes | None:
    """The code, if it is there, whole, of this key, and nobody else's.

    Whoever can write as this user or as root can have code run anyway. Others may at most be able to rename
    or damage files, and nothing of that is run: a file counts only if this user or root owns it, nobody else
    may write to it, and it begins with the digest of its own key and code.
    """
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / f"{key}.o"
    if not path.is_file():  # whoever opens a pipe waits
        return None
    try:
        with path.open("rb") as file:
            if not is_ours(os.fstat(file.fileno())):
                return None
            data = file.read()
    except OSError:
        return None
    code = data[DIGEST:]
    return code if data[:DIGEST] == _digest(key, code) else None


def _write(key: str, code: bytes) -> None:
    """Into place at once, so that another process sees all of it or nothing. A cache that can't be
    written costs time, not a result."""
    folder = cache_folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, code) + code)
            Path(path).replace(folder / f"{key}.o")
        except OSError:
            Path(path).unlink(missing_ok=True)
            raise


def _digest(key: str, code: bytes) -> bytes:
    """The hash of a file's content and key: a file under another key's name isn't accepted."""
    return hashlib.sha256(f"{key}\n".encode() + code).digest()


def _compile(module: ir.Module) -> bytes:
    llvm = _llvm()
    features = ",".join(("+" if on else "-") + name for name, on in sorted(host_features().items()))
    parsed, machine = _optimized(module, llvm.get_host_cpu_name(), features)
    code: bytes = machine.emit_object(parsed)
    return code


def _optimized(module: ir.Module, cpu: str, features: str) -> tuple[Any, Any]:
    llvm = _llvm()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="default")
    # loops are unrolled and vectors formed where a kernel says so, and nowhere else
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed, machine


def _load(code: bytes, name: str) -> tuple[int, Any]:
    llvm = _llvm()
    linker = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(name)
    library = linker.link(_jit(), f"{name}-{next(_numbers)}")
    return library[name], library


@functools.cache
def _jit() -> Any:
    llvm = _llvm()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_lljit_compiler(machine)


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm
