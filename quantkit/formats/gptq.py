"""GPTQ's layout: integer weights of 2, 3, 4 or 8 bits in int32 words that run down the input.

===========  ========  ====================================================================
suffix       dtype     shape
===========  ========  ====================================================================
``qweight``  int32     ``[in * bits / 32, out]``: levels along *in*, low bits first
``qzeros``   int32     ``[groups, out * bits / 32]``: zero points along *out*
``scales``   float16   ``[groups, out]``
``g_idx``    int32     ``[in]``: the group of each input, ``i // group size``
===========  ========  ====================================================================

``w = (level - zero) * scale``. There are two versions. The first, ``gptq``, stores ``zero - 1``; a zero
point of 0 has no place in it, and readers disagree about what comes of one. The second, ``gptq-v2``,
stores the zero point itself. Symmetric weights store the middle level everywhere.
https://arxiv.org/abs/2210.17323, https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

import torch

from quantkit.formats import bits as stream
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import FormatBase, Layout, reason_against_integers
from quantkit.formats.level_values import middle
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import CheckpointError, SpecError

BITS = (2, 3, 4, 8)


class GptqFormat(FormatBase):
    """See the module's docstring.

    Args:
        name: the format's name.
        below: is taken off a zero point before it is stored: 1 in the first version, 0 in the second.
    """

    quant_method = "gptq"
    scales = "float16"
    alone = True

    def __init__(self, name: str, below: int) -> None:
        self.name, self.below = name, below

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but integers of 2, 3, 4 or 8 bits whose rows and columns fill whole words."""
        if (reason := reason_against_integers(self.name, spec, shape)) is not None:
            return reason
        if spec.bits not in BITS:
            return f"{self.name} holds 2, 3, 4 or 8 bits, not {spec.bits}; use format pack-quantized"
        for side, size in (("in", shape[1]), ("out", shape[0])):
            if size * spec.bits % 32:
                return (f"{side}_features {size} of {spec.bits} bits don't fill whole words of 32 bits; "
                        f"use format pack-quantized, or keep the layer with method: null")
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        (rows, cols), groups = shape, spec.scale_shape(shape)[1]
        return {"qweight": (torch.int32, (cols * spec.bits // 32, rows)),
                "qzeros": (torch.int32, (groups, rows * spec.bits // 32)),
                "scales": (torch.float16, (groups, rows)),
                "g_idx": (torch.int32, (cols,))}

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A zero point of 0 is stored in the first version by raising the whole group by a
        level, which leaves its weights as they are.

        Raises:
            SpecError: a group whose zero point is 0 uses the highest level.
        """
        spec, level, zero = codes.spec, codes.codes, codes.zero
        if zero is None:
            zero = torch.full(codes.scale.shape, middle(spec), dtype=torch.uint8, device=level.device)
        elif self.below:
            level, zero = _raised(level, zero, spec)
        down = (zero - self.below).T.contiguous()
        return {"qweight": stream.pack(level, spec.bits).T.contiguous(),
                "qzeros": stream.pack(down, spec.bits),
                "scales": codes.scale.T.to(torch.float16).contiguous(),
                "g_idx": group_index(level.shape[1], layout["scales"][1][0]).to(level.device)}

    def unpack(self, packed: QuantizedTensor) -> Codes:
        """Words → codes.

        Raises:
            CheckpointError: inputs lie in another order than their groups (``desc_act``), a symmetric
                weight's zero points are not the middle level, or a stored zero point is ambiguous.
        """
        spec, (rows, cols) = resolve(packed.spec, packed.dtype, self), packed.shape
        parts = packed.tensors
        groups = spec.scale_shape(packed.shape)[1]
        if not torch.equal(parts["g_idx"].cpu(), group_index(cols, groups)):
            raise CheckpointError("g_idx puts the inputs into groups out of order (desc_act)",
                                  why="every group would need its inputs gathered from all over the row",
                                  next="get a checkpoint made with desc_act: false or static groups, or "
                                       "quantize the original")
        stored = stream.unpack(parts["qzeros"], spec.bits, rows)
        if self.below and bool((stored == 2**spec.bits - 1).any()):
            raise CheckpointError(f"qzeros holds {2**spec.bits - 1}, the word for a zero point of 0 or "
                                  f"{2**spec.bits}", why="readers disagree about it: it can't be read safely",
                                  next="write it again as gptq_v2 with the tool that made it")
        zero = (stored + self.below).T.contiguous()
        if spec.symmetric and bool((zero != middle(spec)).any()):
            raise CheckpointError("qzeros is not the middle level everywhere",
                                  why="the checkpoint says that the weight is symmetric",
                                  next="download the file again, or say 'sym': false in quantization_config")
        level = stream.unpack(parts["qweight"].T.contiguous(), spec.bits, cols)
        scale = parts["scales"].T.to(torch.float32).contiguous()
        return Codes(spec, level, scale, None if spec.symmetric else zero)


def group_index(cols: int, groups: int) -> torch.Tensor:
    """int32 ``[cols]``: the group of each input, in order."""
    return torch.arange(cols, dtype=torch.int32) // (cols // groups)


def _raised(level: torch.Tensor, zero: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and zero points with every group whose zero point is 0 moved one level up."""
    if not bool((low := zero == 0).any()):
        return level, zero
    grouped = level.reshape(*zero.shape, -1)
    if bool((grouped.amax(dim=-1) >= 2**spec.bits - 1)[low].any()):
        raise SpecError("the first version of GPTQ's layout has no place for a zero point of 0",
                        why="a group has one, and uses the highest level too", next="format: gptq-v2")
    return (grouped + low.unsqueeze(-1).to(torch.uint8)).reshape(level.shape), zero + low.to(torch.uint8)


FORMAT, V2 = GptqFormat("gptq", 1), GptqFormat("gptq-v2", 0)
