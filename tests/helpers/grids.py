"""One spec for each grid whose scales aren't numbers by themselves, small enough for tiny weights."""

from __future__ import annotations

from quantkit.formats.spec import Granularity, QuantSpec


def _group(size: int) -> Granularity:
    return Granularity(strategy="group", size=size)


GROUPED = {
    "signed": QuantSpec(bits=4, signed=True, granularity=_group(16), scale_dtype="float16"),
    "minima": QuantSpec(bits=4, symmetric=False, minimum=True, granularity=_group(16),
                        scale_dtype="bfloat16"),
    "superblocks with minima": QuantSpec(bits=4, symmetric=False, minimum=True, superblock=64, scale_bits=6,
                                         granularity=_group(16), scale_dtype="float16"),
    "superblocks": QuantSpec(bits=6, superblock=64, scale_bits=8, granularity=_group(16),
                             scale_dtype="float16"),
    "iq": QuantSpec(kind="iq", bits=4, granularity=_group(16), scale_dtype="float16"),
    "nvfp4": QuantSpec(kind="fp", bits=4, granularity=_group(16), scale_dtype="e4m3"),
    "mxfp4": QuantSpec(kind="fp", bits=4, granularity=_group(32), scale_dtype="e8m0")}
"""Specs by what is special about them."""
