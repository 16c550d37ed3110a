"""What a compiled kernel is made of, read from its machine code. Needs no GPU.

NVIDIA's disassembler lies in triton's wheel; for AMD the compiler's own text is enough.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit_kernels.tools import wgmma

MATRIX = {"cuda": ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA",
                   "UTCOMMA"),
          "hip": ("v_mfma",)}
"""Tensor-core instructions."""
_WIDTHS = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


@dataclass(frozen=True)
class KernelFacts:
    """One kernel on one target.

    Attributes:
        registers: a thread; vector registers on AMD.
        spills: instructions (NVIDIA) or registers (AMD) that go through memory for want of registers.
        shared: bytes of shared memory a block, those of inline assembly with them.
        widest: bits of the widest load from global memory.
        wide_loads: 128-bit loads in the largest loop; in the whole kernel if it has none.
        matrix: whether it has tensor-core instructions.
        loop: instructions in the largest loop; ``None`` without one, and on AMD.
        narrow: copies to shared memory of less than 128 bits in the largest loop.
        hazards: instructions that touch registers of a matrix instruction that may still run: see
            :mod:`~quantkit_kernels.tools.wgmma`.
    """

    registers: int
    spills: int
    shared: int
    widest: int
    wide_loads: int
    matrix: bool
    loop: int | None
    hazards: tuple[str, ...] = ()
    narrow: int = 0


def complaints(log: str) -> tuple[str, ...]:
    """What ptxas warned of, in its words; it says of some things that cost much that they are information.

    Raises ValueError if the log is empty: with ``-v``, as Triton runs it, ptxas always says something.
    """
    if "ptxas" not in log:
        raise ValueError("ptxas's log was not understood")
    warning = re.compile(r"ptxas\S*\s+(?:warning\s*|info\s*:\s*\(C\d+\)):?\s*(.*)")
    matches = map(warning.match, log.splitlines())
    return tuple(sorted({match[1] for match in matches if match}))


def read(compiled: Any) -> KernelFacts:
    """Facts of what ``triton.compile`` returned. Raises ValueError if its text is not understood."""
    if "cubin" in compiled.asm:
        return machine_code(compiled.asm["cubin"], compiled.metadata.shared)
    if "amdgcn" in compiled.asm:
        return _amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    raise ValueError(f"no machine code among {sorted(compiled.asm)}")


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def machine_code(cubin: bytes, shared: int) -> KernelFacts:
    """Facts of NVIDIA's machine code, which asks for ``shared`` bytes. Raises ValueError likewise."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, text = _tool("cuobjdump", "-res-usage", str(file)), _tool("nvdisasm", str(file))
    registers, static = re.search(r"REG:(\d+)", usage), re.search(r"SHARED:(\d+)", usage)
    guarded: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(guarded)
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            guarded.append(match[1])
    code = [wgmma.GUARD.sub("", line_of_code, count=1) for line_of_code in guarded]
    if registers is None or static is None or not code:
        raise ValueError("the disassembly was not understood")
    loop = _largest_loop(code, labels)
    names = {line_of_code.split()[0] for line_of_code in code}
    count = Counter(line_of_code.split()[0].split(".")[0] for line_of_code in code)
    loads = [name for name in names if name.split(".")[0] in ("LDG", "LDGSTS")]
    # from Hopper on the system has 1,024 bytes
    return KernelFacts(int(registers[1]), count["LDL"] + count["STL"], shared + max(0, int(static[1]) - 1024),
                       max(map(_bits, loads), default=0),
                       sum(_bits(line_of_code.split()[0]) == 128 for line_of_code in loop or code
                           if line_of_code.split(".")[0] in ("LDG", "LDGSTS")),
                       any(count[name] for name in MATRIX["cuda"]), len(loop) or None,
                       wgmma.hazards(guarded, labels),
                       sum(_bits(line_of_code.split()[0]) < 128 for line_of_code in loop
                           if line_of_code.startswith("LDGSTS")))


def _largest_loop(code: list[str], labels: dict[str, int]) -> list[str]:
    """Of those with tensor-core instructions, if there are any: what follows a product may be longer."""
    loops: list[list[str]] = [[]]
    for end, line_of_code in enumerate(code):
        target = re.match(r"BRA\S*\s+.*?(\.L_x_\d+)", line_of_code)
        begin = labels.get(target[1], end) if target else end
        if begin < end:  # a branch to itself, behind the end, is none
            loops.append(code[begin:end + 1])
    return max(loops, key=lambda loop: (any(line.split()[0].split(".")[0] in MATRIX["cuda"] for line in loop),
                                        len(loop)))


def _bits(load: str) -> int:
    """The width in bits of an instruction such as ``LDG.E.128`` or ``LDGSTS.E.BYPASS.128``; else 32."""
    match = re.search(r"\.(?:[US]?)(8|16|64|128)(?:\.|$)", load)
    return int(match[1]) if match else 32


def _amd(text: str, shared: int) -> KernelFacts:
    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", text)
        if match is None:
            raise ValueError(f"no {name} in the compiler's text")
        return int(match[1])

    loads = [_WIDTHS.get(kind, 16 if "short" in kind else 8)
             for kind in re.findall(r"(?:global|buffer)_load_(?:lds_)?(dword(?:x[234])?|[a-z]+)", text)]
    # scalar registers are parked in vector registers, which is no memory; scratch is
    spills = number("vgpr_spill_count") or number("private_segment_fixed_size")
    return KernelFacts(number("vgpr_count"), spills, shared, max(loads, default=0),
                       sum(bits == 128 for bits in loads), "v_mfma" in text, None)
