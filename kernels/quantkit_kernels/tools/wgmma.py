"""Races of Hopper's matrix instructions with the rest of a kernel, found in its machine code.

A warpgroup's matrix instructions (``HGMMA``, ``IGMMA``, ``QGMMA`` in machine code, ``wgmma`` in PTX) run
asynchronously. They read their first operand from registers or shared memory and keep their sums in
registers. ``gsb0`` ends a group of them, and ``WARPGROUP.DEPBAR.LE gsb0, n`` waits until at most n groups are
pending. While a group is pending, its operands must not be written, and its sums neither read nor written:
otherwise the result depends on timing. See ``wgmma.wait_group`` in
https://docs.nvidia.com/cuda/parallel-thread-execution/
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_GROUPS = 8
"""Groups that are told apart; older ones count as one. A wait names 7 at most."""
_MATRIX = re.compile(r"[HIQ]GMMA\.64x(\d+)x\d+\.(\w+)\S*\s+R(\d+), (?:R(\d+)|gdesc)")
_OPERAND = 4
"""Registers of a first operand, whatever its type."""
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_REGISTER = re.compile(r"\bR(\d+)\b(?:\.reuse)?(\.64)?")
_LABEL = re.compile(r"`\((\.L_x_\d+)\)")
GUARD = re.compile(r"^@!?U?P\w+\s+")
"""A predicate before an instruction."""
_READ_ONLY = re.compile(r"(?:\w*SETP2?|FCHK|R2P|BAR|WARPSYNC|NANOSLEEP|RET|BRX|JMX|CALL)\b")
"""Operations whose first register is no result."""


@dataclass(frozen=True)
class PendingRegisters:
    """Registers of groups that may be pending, the newest first; ``begun``: of one that isn't closed yet.

    Pairs of a register and whether it is a sum.
    """

    begun: frozenset[tuple[int, bool]] = frozenset()
    pending: tuple[frozenset[tuple[int, bool]], ...] = ()

    def after(self, instruction: str) -> PendingRegisters:
        """What may be pending behind it."""
        matrix, wait = _MATRIX.search(instruction), _WAIT.search(instruction)
        begun, pending = self.begun, self.pending
        if matrix:
            first = int(matrix[3])
            # half-precision sums lie in pairs
            sums = range(first, first + int(matrix[1]) // (4 if matrix[2] == "F16" else 2))
            begun |= {(register, True) for register in sums}
            if matrix[4]:
                begun |= {(int(matrix[4]) + at, False) for at in range(_OPERAND)}
            if "gsb0" in instruction:
                begun, pending = frozenset(), (begun, *pending)
        elif wait and not GUARD.match(instruction):
            pending = pending[:int(wait[1], 16)]
        if len(pending) > MOST_GROUPS:
            pending = (*pending[:MOST_GROUPS - 1], frozenset().union(*pending[MOST_GROUPS - 1:]))
        return PendingRegisters(begun, pending)

    def joined(self, other: PendingRegisters) -> PendingRegisters:
        """What may be pending where two ways meet."""
        fewer, more = sorted((self.pending, other.pending), key=len)
        both = tuple(a | b for a, b in zip(fewer, more)) + more[len(fewer):]
        return PendingRegisters(self.begun | other.begun, both)

    def touched(self, instruction: str) -> bool:
        """Whether the instruction does what it mustn't."""
        if _MATRIX.search(instruction):  # those of one warpgroup are in order
            return False
        used = self.begun.union(*self.pending)
        written, read = registers(instruction)
        return any((register, False) in used or (register, True) in used for register in written) \
            or any((register, True) in used for register in read)


def registers(instruction: str) -> tuple[set[int], set[int]]:
    """The registers that an instruction writes, and those that it reads."""
    name, _, rest = GUARD.sub("", instruction, count=1).partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    while operands and re.fullmatch(r"!?U?P(?:T|R|\d)", operands[0]):
        del operands[0]
    result = operands and not _READ_ONLY.match(name) and re.fullmatch(r"R(\d+)", operands[0])
    written = set(range(int(result[1]), int(result[1]) + _width(name))) if result else set()
    read: set[int] = set()
    stored = re.match(r"(?:ST|RED|ATOM|LDGSTS)", name)
    for operand in operands[1:] if result else operands:
        for register in _REGISTER.finditer(operand):
            value = stored and "[" not in operand
            several = _width(name) if value else 2 if register[2] else 1
            read.update(range(int(register[1]), int(register[1]) + several))
    return written, read


def _width(name: str) -> int:
    """Registers of the result, or of what is stored."""
    if re.match(r"(?:HMMA|IMMA|DMMA|QMMA|LDSM|STSM)\b", name):
        several = re.search(r"\.(\d)$", name)
        return int(several[1]) if several else 4
    if re.match(r"(?:IMAD\.WIDE|D(?:ADD|MUL|FMA)\b|CS2R(?!\.32)|(?:F2F|I2F|FRND)\.F64)", name):
        return 2
    wide = re.match(r"(?:LD|ST|ATOM|RED).*\.(?:[US]?)(64|128)(?:\.|$)", name)
    return int(wide[1]) // 32 if wide else 1


def hazards(code: list[str], labels: dict[str, int]) -> tuple[str, ...]:
    """Instructions that touch what is still used, in order.

    Args:
        code: instructions with their guards, as nvdisasm prints them.
        labels: the instruction that each stands before.
    """
    if not any(_MATRIX.search(instruction) for instruction in code):
        return ()
    meetings: dict[str, list[int]] = {}  # a barrier → where the threads that wait for it go on
    for instruction in code:
        if (begin := re.search(r"\bBSSY\S* (B\d+)", instruction)) and (label := _LABEL.search(instruction)):
            meetings.setdefault(begin[1], []).append(labels[label[1]])
    before: dict[int, PendingRegisters] = {0: PendingRegisters()}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        state = before[at].after(code[at])
        for to in _next(code[at], at, labels, meetings):
            if to < len(code):
                joined = state.joined(before[to]) if to in before else state
                if before.get(to) != joined:
                    before[to] = joined
                    waiting.append(to)
    return tuple(code[at] for at in sorted(before) if before[at].touched(code[at]))


def _next(instruction: str, at: int, labels: dict[str, int], meetings: dict[str, list[int]]) -> list[int]:
    """Where it goes on from an instruction."""
    bare = GUARD.sub("", instruction, count=1)
    name, label = bare.split(maxsplit=1)[0].split(".")[0], _LABEL.search(bare)
    always = bare == instruction
    if name in ("EXIT", "RET") and always:
        return []
    if name == "BRA" and label:
        return [labels[label[1]]] if always and re.match(r"BRA `", bare) else [at + 1, labels[label[1]]]
    if name == "BSYNC":
        return [at + 1, *meetings.get(bare.split()[1], ())]
    return [at + 1]
