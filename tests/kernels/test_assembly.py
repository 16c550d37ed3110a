"""What is read from machine code: on texts small enough to count by eye."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quantkit_kernels.tools import assembly

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16 R7, desc[UR4][R2.64] ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R8, R4, gdesc[UR8] ;
        /*0050*/                   STL [R1], R4 ;
        /*0058*/                   LDGSTS.E [R3+0x40], desc[UR4][R2.64] ;
        /*0060*/              @P1  BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""
AMD = """
\tglobal_load_dwordx4 v[2:5], v[0:1], off
\tbuffer_load_dwordx2 v[6:7], v8, s[4:7], 0 offen
\tglobal_load_ushort v9, v[0:1], off
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[2:3], v[4:5], v[0:3]
    .private_segment_fixed_size: {scratch}
    .sgpr_spill_count: 3
    .vgpr_count:     96
    .vgpr_spill_count: 0
"""


def test_nvidia(monkeypatch):
    monkeypatch.setattr(assembly, "_tool", lambda name, *rest: SASS if name == "nvdisasm" else
                        "Function k:\n  REG:71 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:572")
    facts = assembly.read(SimpleNamespace(asm={"cubin": b""}, metadata=SimpleNamespace(shared=512)))
    assert facts == assembly.KernelFacts(registers=71, spills=1, shared=512, widest=128, wide_loads=1,
                                         matrix=True, loop=6, hazards=("LDG.E.U16 R7, desc[UR4][R2.64]",),
                                         narrow=1)


@pytest.mark.parametrize(("scratch", "spills"), [(0, 0), (64, 64)])
def test_amd(scratch, spills):
    text = AMD.format(scratch=scratch)
    facts = assembly.read(SimpleNamespace(asm={"amdgcn": text}, metadata=SimpleNamespace(shared=0)))
    assert facts == assembly.KernelFacts(registers=96, spills=spills, shared=0, widest=128, wide_loads=1,
                                         matrix=True, loop=None)


LOG = """
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Used 50 registers, used 1 barriers
ptxas warning : Registers are spilled to local memory in function 'k'
ptxas-blackwell info    : (C7515) Potential Performance Loss: of another name
"""


def test_what_the_assembler_complains_of():
    assert assembly.complaints(LOG) == (
        "Potential Performance Loss: of another name",
        "Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "Registers are spilled to local memory in function 'k'")
    assert assembly.complaints("ptxas info    : 0 bytes gmem\n") == ()
    with pytest.raises(ValueError, match="log"):
        assembly.complaints("")


def test_what_is_not_understood():
    for asm in ({}, {"amdgcn": "nothing"}):
        with pytest.raises(ValueError):
            assembly.read(SimpleNamespace(asm=asm, metadata=SimpleNamespace(shared=0)))
