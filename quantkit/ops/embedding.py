"""Rows of an embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit.formats.base import QuantizedTensor
from quantkit.ops.cpu_weight import CpuWeight, isa, pool
from quantkit.ops.device_weight import DeviceWeight
from quantkit.progress import tell_compiling

Table = torch.Tensor | QuantizedTensor | CpuWeight | DeviceWeight
"""An embedding ``[vocab, size]``: plain, as it is stored, or as a kernel multiplies by it."""


def embed(ids: torch.Tensor, table: Table, dtype: torch.dtype) -> torch.Tensor:
    """int64 ``[...]`` → ``[..., size]`` in ``dtype``: of a quantized table only these rows are decoded.

    Raises:
        IndexError: an id isn't in the table.
    """
    assert not isinstance(table, DeviceWeight), "a program has this table"
    if isinstance(table, torch.Tensor):
        return F.embedding(ids, table).to(dtype)
    flat = ids.reshape(-1)
    if not len(flat):
        return torch.empty(*ids.shape, table.shape[1], dtype=dtype, device=ids.device)
    # a GPU isn't waited for
    if ids.device.type == "cpu" and not 0 <= int(flat.min()) <= int(flat.max()) < table.shape[0]:
        raise IndexError(f"a token id isn't in 0 … {table.shape[0] - 1}")
    if isinstance(table, CpuWeight):
        rows = _look_up(flat, table)
    else:
        from quantkit.plugins import registry

        rows = registry("formats").get(table.format).rows(table, flat)
    return rows.to(dtype).reshape(*ids.shape, table.shape[1])


def _look_up(ids: torch.Tensor, packed: CpuWeight) -> torch.Tensor:
    """Rows of a packed weight, int64 ``[m]`` → float32 ``[m, in]``."""
    from quantkit_kernels.cpu.embedding import Embed
    from quantkit_kernels.cpu.program import Program

    ids = ids.contiguous()
    out = torch.empty(len(ids), packed.columns)
    program = Program(isa())
    program.add(Embed(packed.kernel), len(ids), ids=ids, out=out, size=packed.shape[1], padded=packed.columns,
                out_stride=packed.columns * 4, **packed.table)
    program.finish(tell_compiling)
    pool().run(program.records)
    return out[:, :packed.shape[1]]
