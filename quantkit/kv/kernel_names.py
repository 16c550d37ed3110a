"""Which codecs kernels read, and by which names."""

from __future__ import annotations

from quantkit.kv.base import SideCodec

OURS = "quantkit.kv.codecs."
"""Modules of the codecs that kernels read."""
KERNEL_NAMES = frozenset({"none", "bf16", "f16", "f32", "f32_hadamard", "int8", "fp8"} | {
    f"{kind}{bits}{mean}" for bits in (2, 3, 4)
    for kind, means in (("token", ("",)), ("channel", ("",)), ("hadamard", ("", "c"))) for mean in means})
"""Names by which a kernel chooses its code, so that no other codec may have them."""


def is_ours(codec: SideCodec) -> bool:
    """Whether a side's codec is a built-in one, which kernels read."""
    return type(codec).__module__.startswith(OURS)
