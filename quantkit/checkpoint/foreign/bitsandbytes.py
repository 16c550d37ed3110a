"""bitsandbytes checkpoints, as transformers saves them: NF4 with plain or nested scales, and int8.

Of int8, the weights are read. bitsandbytes also rounds activations to int8 when a model runs, all but the
outliers (``llm_int8_threshold``); quantkit doesn't.
"""

from __future__ import annotations

import json

import torch

from quantkit.checkpoint.foreign.base import (
    ORIGINAL,
    ForeignLayer,
    Infos,
    Layers,
    Tensors,
    check_stored,
    contradiction,
)
from quantkit.formats.bnb_nf4 import NESTED_BLOCK, STATE, quant_state
from quantkit.formats.dtypes import FLOATS, dtype_name
from quantkit.formats.level_values import codebook
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.support.errors import CheckpointError
from quantkit.support.strict_json import parse_object

HARMLESS = frozenset({
    "quant_method", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload", "bnb_4bit_use_double_quant", "bnb_4bit_target_parameters"})
"""How others run it, and what each layer's own state says."""
MAX_STATE = 4096
FP4 = "weight.quant_state.bitsandbytes__fp4"


def layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    """A layer is quantized if it has a quantization state (4 bits) or ``SCB`` (8 bits)."""
    four, eight = (any([config.flag(f"load_in_{bits}bit"), config.flag(f"_load_in_{bits}bit")])
                   for bits in (4, 8))
    if four == eight:
        raise config.wrong("load_in_4bit", four, "one of load_in_4bit and load_in_8bit must be true")
    config.only("llm_int8_has_fp16_weight", (False,))
    if four:
        config.only("bnb_4bit_quant_type", ("nf4",))
    else:
        config.raw("bnb_4bit_quant_type")
    skipped = config.raw("llm_int8_skip_modules", [])
    if not isinstance(skipped, list):
        raise config.wrong("llm_int8_skip_modules", skipped, "it must be a list of names")
    config.finish(HARMLESS, {})
    nested = config.raw("bnb_4bit_use_double_quant", False)

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        mark = STATE if four else "SCB"
        if f"{slot.name}.{FP4}" in infos:
            raise CheckpointError(f"{slot.name} is FP4", why="only NF4 can be read", next=ORIGINAL)
        if f"{slot.name}.{mark}" not in infos:
            return None
        if slot.name in skipped:
            raise contradiction(slot, "'llm_int8_skip_modules'")
        return _nf4(slot, infos, dtype, bool(nested)) if four else _int8(slot, infos, dtype)

    return layer


def _int8(slot: LinearSlot, infos: Infos, dtype: str) -> ForeignLayer:
    spec = QuantSpec(bits=8, granularity=Granularity(strategy="channel"), scale_dtype="float32")
    check_stored(slot, infos, "weight")
    if f"{slot.name}.weight_format" in infos:
        return ForeignLayer("bnb-int8", spec, dtype, ("weight", "SCB", "weight_format"))
    return ForeignLayer("bnb-int8", spec, dtype, ("weight", "SCB"),
                        lambda tensors: {**tensors, "weight_format": torch.zeros((), dtype=torch.uint8)})


def _nf4(slot: LinearSlot, infos: Infos, dtype: str, nested: bool) -> ForeignLayer:
    """Block size and dtype are taken from the sizes of the tensors and checked with the state's own words."""
    names = ["weight", "weight.absmax", "weight.quant_map", STATE]
    names += ["weight.nested_absmax", "weight.nested_quant_map"] if nested else []
    check_stored(slot, infos, *names)
    blocks = infos[f"{slot.name}.weight.absmax"].shape
    count = slot.out_features * slot.in_features
    sizes = [size for size in (32, 64, 128, 256, 512, 1024, 2048, 4096) if blocks == (-(-count // size),)]
    if not sizes:
        raise CheckpointError(f"{slot.name}.weight.absmax is {list(blocks)}",
                              why=f"no block size gives that number of scales for {count} weights",
                              next="download the checkpoint again")
    spec = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=sizes[0]),
                     scale_dtype="float32", nested=nested)

    def convert(tensors: Tensors) -> Tensors:
        """Their state as our layout writes it; their bytes as bytes, whatever dtype they have."""
        state = _state(slot, tensors[STATE], spec, dtype)
        table = tensors["weight.quant_map"]
        if table.shape != (16,) or not torch.allclose(table.float(), codebook(), atol=1e-6):
            raise CheckpointError(f"{slot.name}.weight.quant_map is not the table of NF4", next=ORIGINAL)
        flat = tensors["weight"].contiguous().reshape(-1).view(torch.uint8).unsqueeze(1)
        return {**tensors, "weight": flat, STATE: state}

    return ForeignLayer("bnb-nf4", spec, dtype, tuple(names), convert, ("weight", STATE))


def _state(slot: LinearSlot, stored: torch.Tensor, spec: QuantSpec, dtype: str) -> torch.Tensor:
    """The JSON of one layer, checked key by key and written again for our layout, in the model's dtype."""
    try:
        if stored.numel() > MAX_STATE:
            raise ValueError(f"{stored.numel()} bytes")
        content = parse_object(bytes(stored.numpy()), "it", error=CheckpointError)
        offset = float(content["nested_offset"]) if spec.nested else None
        kind = FLOATS[str(content["dtype"]).removeprefix("torch.")]
    except (CheckpointError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{slot.name}.{STATE} is no quantization state of NF4",
                              why=f"{type(error).__name__}: {error}"[:200],
                              next="download the checkpoint again") from error
    shape = (slot.out_features, slot.in_features)
    defaults = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"} if spec.nested else {}
    if {**defaults, **content, "dtype": dtype_name(kind)} != json.loads(quant_state(spec, shape, kind,
                                                                                    offset)):
        raise CheckpointError(f"{slot.name}.{STATE} contradicts the layer it lies beside",
                              why=f"it says {json.dumps(content)[:300]}",
                              next="download the checkpoint again")
    return torch.frombuffer(bytearray(quant_state(spec, shape, FLOATS[dtype], offset)), dtype=torch.uint8)
