"""MLX checkpoints in the affine mode, as ``mlx_lm.convert -q`` writes them.

A layer is quantized if it has ``scales``: that is how mlx-lm decides where ``quantization`` doesn't name the
layer. A name with a table has bits and a group size of its own, one with ``false`` is plain. What isn't named
has the bits and the group size that its tensors' shapes say: mlx-lm 0.32 doesn't ask the defaults either.

A bias is read as the minimum of its group, whatever the sign of the scale: MLX gives a group whose largest
weight is positive a negative scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.foreign.base import ForeignLayer, Infos, Layers, check_stored, contradiction
from quantkit.formats.dtypes import FLOATS, dtype_name
from quantkit.formats.mlx import BITS, GROUPS
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.support.errors import CheckpointError

HARMLESS = frozenset({"quant_method"})
MODES = ("affine",)
STORED = ("weight", "scales", "biases")
Scheme = tuple[int, int]
"""Bits and group size."""
PLAIN: Scheme = (0, 0)
"""Of a layer that isn't quantized."""


def layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    default = _scheme(config)
    named = {name: _entry(value, default, f"{config.where}: {name}")
             for name, value in config.raw("layers").items()}
    config.finish(HARMLESS, {})

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        entry, stored = named.get(slot.name), f"{slot.name}.scales" in infos
        if not stored and entry in (None, PLAIN):
            return None
        if entry == PLAIN:
            raise contradiction(slot, f"'{slot.name}': false")
        check_stored(slot, infos, *STORED)
        bits, size = entry or _stored_scheme(slot, infos)
        scales = infos[f"{slot.name}.scales"].dtype
        if scales not in FLOATS.values():
            raise CheckpointError(f"{slot.name}.scales is {scales}", why=f"known: {', '.join(FLOATS)}",
                                  next="download the checkpoint again")
        spec = QuantSpec(bits=bits, symmetric=False, minimum=True,
                         granularity=Granularity(strategy="group", size=size))
        kept_in = dtype_name(scales)
        return ForeignLayer("mlx", spec.model_copy(update={"scale_dtype": kept_in}), kept_in, STORED)

    return layer


def _entry(value: Mapping[str, Any] | bool, default: Scheme, where: str) -> Scheme:
    """What a layer's name has beside it. Raises UnsupportedModelError for anything else than a scheme."""
    if isinstance(value, bool):
        return default if value else PLAIN
    table = ConfigReader(value, where)
    scheme = _scheme(table)
    table.finish(frozenset(), {})
    return scheme


def _scheme(config: ConfigReader) -> Scheme:
    """Bits and group size of a table. Raises UnsupportedModelError for others than the layout has."""
    config.only("mode", MODES)
    config.only("bits", BITS)
    config.only("group_size", GROUPS)
    return config.integer("bits"), config.integer("group_size")


def _stored_scheme(slot: LinearSlot, infos: Infos) -> Scheme:
    """Bits and group size of a layer by its tensors' shapes."""
    words, scales = (infos[f"{slot.name}.{suffix}"].shape for suffix in ("weight", "scales"))
    if len(words) == len(scales) == 2 and scales[1]:
        bits, rest = divmod(words[1] * 32, slot.in_features)
        size, left = divmod(slot.in_features, scales[1])
        if not (rest or left) and bits in BITS and size in GROUPS:
            return bits, size
    raise CheckpointError(f"{slot.name} is stored in no scheme of MLX's affine mode",
                          why=f"of [{slot.out_features}, {slot.in_features}] it has weight {list(words)} and "
                              f"scales {list(scales)}", next="download the checkpoint again")
