"""AWQ checkpoints in the GEMM layout, as AutoAWQ and GPTQModel write them.

Zero points are in the file also where the config says that there are none (GPTQModel's symmetric weights),
and its readers use them. Scales of a bfloat16 model may be bfloat16 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quantkit.checkpoint.foreign.base import (
    ORIGINAL,
    ForeignLayer,
    Infos,
    Layers,
    Tensors,
    check_stored,
    contradiction,
    granularity,
    group_size,
)
from quantkit.formats.dtypes import FLOATS
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.support.errors import CheckpointError

HARMLESS = frozenset({
    "quant_method", "method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
    "meta", "damp_percent", "true_sequential", "tokenizer", "dataset", "model_seqlen", "desc_act", "sym",
    "act_group_aware", "lm_head", "pack_dtype", "block_name_to_quantize", "module_name_preceding_first_block",
    "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs", "modules_in_block_to_quantize"})
"""How the weights were found, and how others run them."""
INERT: Mapping[str, tuple[Any, ...]] = {
    "version": ("gemm", "GEMM"), "format": ("gemm",), "checkpoint_format": ("gemm",),
    "zero_point": (True, False),
    "adapter": ({},), "rotation": (), "dynamic": ({},), "bits": (4,), "w_bit": (4,)}
BACKENDS = ("auto", "autoawq", "legacy_awq", "gemm")


def layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    """A layer is quantized if it has ``qweight``; ``modules_to_not_convert`` must agree."""
    if config.raw("bits") is None and config.raw("w_bit") is None:
        config.integer("bits")
    config.only("backend", BACKENDS)
    size = group_size(config, "group_size" if config.raw("group_size") is not None else "q_group_size")
    kept = config.raw("modules_to_not_convert", [])
    if not isinstance(kept, list) or not all(isinstance(name, str) and name for name in kept):
        raise config.wrong("modules_to_not_convert", kept, "it must be a list of names")
    for key, allowed in INERT.items():
        config.only(key, allowed)
    config.finish(HARMLESS, INERT)
    spec = QuantSpec(bits=4, symmetric=False, granularity=granularity(size), scale_dtype="float16")

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        if f"{slot.name}.qweight" not in infos:
            return None
        if any(name in slot.name for name in kept):
            raise contradiction(slot, "'modules_to_not_convert'")
        check_stored(slot, infos, "qzeros", "scales")
        return ForeignLayer("awq", spec, dtype, ("qweight", "qzeros", "scales"), _half_scales(slot),
                            ("scales",))

    return layer


def _half_scales(slot: LinearSlot) -> Callable[[Tensors], Tensors]:
    def convert(tensors: Tensors) -> Tensors:
        """Scales as our layout has them, if float16 holds each."""
        scales = tensors["scales"]
        half = scales.to(torch.float16)
        if scales.dtype not in FLOATS.values() or not torch.equal(half.to(scales.dtype), scales):
            raise CheckpointError(f"{slot.name}.scales is {scales.dtype}", next=ORIGINAL,
                                  why="float16, by which its readers multiply, doesn't hold its values")
        return {**tensors, "scales": half}

    return convert
