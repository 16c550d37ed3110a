"""Registers that Hopper's tensor cores still use: found in texts small enough to follow by eye, and in what
ptxas makes of a kernel that overwrites them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from quantkit_kernels.tools import assembly, wgmma

LOOP = """
.L_x_0:
LDS.128 R88, [R4]
{before}
WARPGROUP.ARRIVE
HGMMA.64x16x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0
{after}
@P0 BRA `(.L_x_0)
WARPGROUP.DEPBAR.LE gsb0, 0x0
FADD R24, R24, R25
EXIT
"""
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def parse(text):
    code, labels = [], {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        else:
            code.append(line)
    return code, labels


def found(text):
    return wgmma.hazards(*parse(text))


@pytest.mark.parametrize(("before", "after", "hazards"), [
    ("", WAIT, ()),
    (WAIT, "", ("LDS.128 R88, [R4]",)),  # too late: the next operand is there before the wait
    ("", "", ("LDS.128 R88, [R4]",)),
    ("", "WARPGROUP.DEPBAR.LE gsb0, 0x1", ("LDS.128 R88, [R4]",)),
    ("", "@P1 " + WAIT, ("LDS.128 R88, [R4]",)),  # not every time
    ("", "MOV R91, RZ\n" + WAIT, ("MOV R91, RZ",)),
    ("", "MOV R92, R91\n" + WAIT, ()),  # operands may be read
    ("", "CS2R R86, SRZ\n" + WAIT, ()),
    ("", "CS2R R90, SRZ\n" + WAIT, ("CS2R R90, SRZ",)),
    ("", "FADD R5, R31, R6\n" + WAIT, ("FADD R5, R31, R6",)),  # sums may not
    ("", "FADD R5, R32, R6\n" + WAIT, ()),  # 64 x 16 sums are 8 a thread
    ("", "IMAD.WIDE R22, R5, 0x4, R6\n" + WAIT, ()),
    ("", "IMAD.WIDE.U32 R30, R5, 0x4, R6\n" + WAIT, ("IMAD.WIDE.U32 R30, R5, 0x4, R6",)),
    ("", "STG.E.128 desc[UR4][R2.64], R20\n" + WAIT, ()),
    ("", "STG.E.128 desc[UR4][R2.64], R21\n" + WAIT, ("STG.E.128 desc[UR4][R2.64], R21",)),
    ("", "ISETP.GE.AND P0, PT, R88, R5, PT\n" + WAIT, ()),
    ("", "IADD3 R88, P1, R5, R6, RZ\n" + WAIT, ("IADD3 R88, P1, R5, R6, RZ",)),
    ("", "@!P2 LOP3.LUT P1, R89, R5, 0xff, RZ, 0xc0, !PT\n" + WAIT,
     ("@!P2 LOP3.LUT P1, R89, R5, 0xff, RZ, 0xc0, !PT",)),
    ("", "SHF.L.U64.HI R87, R5, 0x1, R6\n" + WAIT, ()),  # of 64 bits it gives the upper half
])
def test_one_group_in_a_loop(before, after, hazards):
    assert found(LOOP.format(before=before, after=after)) == hazards


def test_a_wait_on_one_of_two_ways_is_not_enough():
    """As where a segment ends: the sum is used there, and only there is everything waited for."""
    text = LOOP.format(before="", after="@P1 BRA `(.L_x_1)\n{}\nMOV R24, RZ\n.L_x_1:")
    assert found(text.format(WAIT)) == ("LDS.128 R88, [R4]",)
    assert found(text.format(WAIT).replace("@P1 BRA", f"{WAIT}\n@P1 BRA")) == ()


def test_groups_are_waited_for_in_order():
    two = """
    HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24
    HGMMA.64x8x16.F32.BF16 R24, R44, gdesc[UR8], R24, gsb0
    HGMMA.64x8x16.F32.BF16 R24, R48, gdesc[UR8], R24, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x1
    MOV R43, RZ
    MOV R47, RZ
    MOV R48, RZ
    EXIT
    """
    assert found(two) == ("MOV R48, RZ",)
    assert found(two.replace("0x1", "0x2")) == ("MOV R43, RZ", "MOV R47, RZ", "MOV R48, RZ")


@pytest.mark.parametrize(("instruction", "last"), [
    ("HGMMA.64x32x16.F32.BF16 R24, R88, gdesc[UR8], RZ, !UPT, gsb0", 39),
    ("HGMMA.64x32x16.F16 R24, R88, gdesc[UR8], RZ, !UPT, gsb0", 31),
    ("IGMMA.64x32x32.S8.S8 R24, R88, gdesc[UR8], RZ, !UPT, gsb0", 39),
    ("QGMMA.64x32x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT, gsb0", 39)])
def test_how_many_registers_sums_take(instruction, last):
    assert found(f"{instruction}\nMOV R{last}, RZ\nMOV R{last + 1}, RZ\nEXIT") == (f"MOV R{last}, RZ",)


def test_many_groups_without_a_wait_are_bounded():
    code, labels = parse(LOOP.format(before="", after=""))
    lines = ["HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0"] * 50
    behind = labels | {".L_x_0": len(lines) + 1}
    assert wgmma.hazards([*lines, "MOV R40, RZ", *code], behind)[0] == "MOV R40, RZ"


def test_code_without_such_instructions():
    assert found("LDS.128 R88, [R4]\nHMMA.16816.F32.BF16 R4, R8, R12, R4\nEXIT") == ()


PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 a, .param .u64 y, .param .u32 n) .reqntid 128
{{
  .reg .b32 %a<4>; .reg .f32 %y<4>; .reg .b64 %p, %o, %d; .reg .b32 %n; .reg .pred %more;
  ld.param.u64 %p, [a]; ld.param.u64 %o, [y]; ld.param.u32 %n, [n];
  mov.b64 %d, 4611686293305294848;
  mov.f32 %y0, 0f00000000; mov.f32 %y1, 0f00000000; mov.f32 %y2, 0f00000000; mov.f32 %y3, 0f00000000;
LOOP:
  ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%p];
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%y0,%y1,%y2,%y3}},
    {{%a0,%a1,%a2,%a3}}, %d, 1, 1, 1, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned {left};
  add.u64 %p, %p, 16;
  sub.u32 %n, %n, 1;
  setp.ne.u32 %more, %n, 0;
  @%more bra LOOP;
  wgmma.wait_group.sync.aligned 0;
  st.global.v4.f32 [%o], {{%y0, %y1, %y2, %y3}};
  ret;
}}
"""


@pytest.mark.parametrize(("left", "race"), [(0, False), (1, True)])
def test_what_ptxas_makes_of_a_kernel(tmp_path, left, race):
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    source, target = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(PTX.format(left=left))
    subprocess.run([str(ptxas), "--gpu-name=sm_90a", str(source), "-o", str(target)], check=True)
    facts = assembly.machine_code(target.read_bytes(), 0)
    assert facts.matrix and bool(facts.hazards) == race
    assert all("R" in one for one in facts.hazards)


JUDGE = """
import dataclasses, json
from quantkit_kernels.tools.aot import judge
from quantkit_kernels.tools.cases import aot_cases
every = {case.name: case for case in aot_cases("sm_90")}
print(json.dumps({f"{name} {apart}": judge(dataclasses.replace(every[name],
    constants=every[name].constants | {"FRESH": apart}), "sm_90").faults
    for name in ("w16a16 m16", "w16a16 m2048") for apart in (False, True)}))
"""


def test_sums_that_are_carried_from_tile_to_tile_are_caught():
    """By the check, or by ptxas's warning where it waits after every instruction instead."""
    done = subprocess.run([sys.executable, "-c", JUDGE], env=_compiled(), capture_output=True, text=True,
                          timeout=600, check=True)
    faults = json.loads(done.stdout)
    assert faults["w16a16 m16 True"] == faults["w16a16 m2048 True"] == []
    assert any("serialized" in fault for fault in faults["w16a16 m16 False"])
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        assert any("serialized" in fault or "still use" in fault for fault in faults["w16a16 m2048 False"])


def _compiled():
    """The environment of a process in which kernels are compiled."""
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
