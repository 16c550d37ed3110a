"""Each tool's quantizers with its own settings: ``tool`` of the spec names the tool, ``method`` its variant.

A tool is imported where it is used: each has an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from common import PeerWeights
from safetensors.torch import load_file

Spec = dict[str, Any]


def hqq(model: Path, tokens: torch.Tensor | None, spec: Spec, scratch: Path) -> PeerWeights:
    """HQQ: zero points by half-quadratic optimization, float16 scales and zeros."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    config = BaseQuantizeConfig(nbits=spec["bits"], group_size=group_of(spec), axis=1)
    weights, bits = {}, 0
    for layer, linear in plain_linears(model):
        quantized = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
        bits += 8 * (quantized.W_q.nbytes + quantized.meta["scale"].nbytes + quantized.meta["zero"].nbytes)
        exact = quantized.meta | {"scale": quantized.meta["scale"].float(),
                                  "zero": quantized.meta["zero"].float(), "compute_dtype": torch.float32}
        weights[layer] = Quantizer.dequantize(quantized.W_q, exact)
    return PeerWeights(weights, bits, {"axis": 1})


def sinq(model: Path, tokens: torch.Tensor | None, spec: Spec, scratch: Path) -> PeerWeights:
    """SINQ: rows and columns of a weight are scaled by Sinkhorn-like iterations until their standard
    deviations agree, and then rounded to nearest.

    Of its methods ``sinq``, the one that its documentation recommends, stores scales and zeros in 8 bits,
    ``sinq_dual`` in float16. A layer has a scale and a zero point for each group of a row, and a scale for
    each column. Layers of high kurtosis are rounded without column scales; that is its own choice.
    """
    os.environ["SINQ_AUTO_PATCH"] = "0"  # transformers is not needed here
    from sinq.quantizer import Quantizer, dq8
    from sinq.sinqlinear import BaseQuantizeConfig, SINQLinear

    def stored(part: Any) -> int:
        """Bits of scales or zero points: plain ones in float16, or 8 bits with ranges in float16."""
        if isinstance(part, torch.Tensor):
            return 16 * part.numel()
        codes, scale, low, _ = part
        return 8 * codes.numel() + 16 * (scale.numel() + low.numel())

    def restored(part: Any) -> torch.Tensor:
        """The same in float32, as far as what is stored goes."""
        if isinstance(part, torch.Tensor):
            return part.half().float()
        codes, scale, low, shape = part
        return dq8((codes, scale.half().float(), low.half().float(), shape))

    weights, bits = {}, 0
    for layer, linear in plain_linears(model):
        config = BaseQuantizeConfig(nbits=spec["bits"], tiling_mode="1D", method=spec["method"],
                                    group_size=group_of(spec))
        quantized = SINQLinear(linear, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
        meta = quantized.meta
        bits += 8 * quantized.W_q.nbytes + sum(stored(meta[part]) for part in ("scale", "zero", "scale2"))
        exact = {part: restored(meta[part]) for part in ("scale", "zero", "scale2")}
        weights[layer] = Quantizer.dequantize(quantized.W_q, meta | exact | {
            "method": meta["method"].replace("_quantAux", ""), "compute_dtype": torch.float32})
    return PeerWeights(weights, bits, {"method": spec["method"], "axis": 1})


def group_of(spec: Spec) -> int | None:
    """Weights that share a scale; ``None``: a row."""
    return None if spec["group"] < 0 else spec["group"]


def plain_linears(model: Path) -> Any:
    """Names of the layers that are quantized, and modules with their weights in float32."""
    tensors = load_file(model / "model.safetensors")
    for layer, (rows, columns) in common.linears(model).items():
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = tensors[f"{layer}.weight"].float()
        yield layer, linear


def llmcompressor(model: Path, tokens: torch.Tensor | None, spec: Spec, scratch: Path) -> PeerWeights:
    """llm-compressor: GPTQ with static activation order, AWQ or AutoRound, calibrated a window at a time."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout, group = "pack-quantized", spec["group"]
    grid = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=spec["bits"], type="int", symmetric=spec["symmetric"], **grid)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    modifiers, settings = llmcompressor_recipe(
        spec, {"config_groups": {"all": scheme}, "ignore": ["lm_head"]})
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    data = {} if tokens is None else {
        "dataset": Dataset.from_dict({"input_ids": tokens.tolist(),
                                      "attention_mask": torch.ones_like(tokens).tolist()}),
        "num_calibration_samples": len(tokens), "max_seq_length": tokens.shape[1],
        "shuffle_calibration_samples": False}
    oneshot(model=loaded, recipe=modifiers, **data,
            tokenizer=AutoTokenizer.from_pretrained(model, local_files_only=True))
    loaded.save_pretrained(scratch, save_compressed=True)
    layers = list(common.linears(model))
    bits = common.stored_bits(scratch, layers)
    compressor, weights = BaseCompressor.get_value_from_registry(layout), {}
    for layer, parts in common.parts_of(scratch, layers).items():
        parts["weight_scale"] = parts["weight_scale"].float()  # or products are rounded to its dtype
        weights[layer] = compressor.decompress(parts, scheme)["weight"]
    norms = {name.removesuffix(".weight"): tensor for shard in sorted(scratch.glob("*.safetensors"))
             for name, tensor in load_file(shard).items()
             if ".layers." in name and name.endswith("norm.weight")}  # which AWQ scales
    return PeerWeights(weights | norms, bits, settings)


def llmcompressor_recipe(spec: Spec, grid: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Its modifiers of a method, and what is worth telling about them."""
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if spec["method"] == "awq":
        if not torch.accelerator.is_available():  # what it pins is for copies to one
            IntermediatesCache.pin_memory = lambda *_: None
        modifier = AWQModifier()
        return [modifier, QuantizationModifier(**grid)], {"duo_scaling": modifier.duo_scaling,
                                                          "n_grid": modifier.n_grid}
    if spec["method"] == "autoround":
        modifier = AutoRoundModifier(**grid, iters=spec["iters"], enable_torch_compile=False)
        return [modifier], {"iters": modifier.iters, "batch_size": modifier.batch_size}
    modifier = GPTQModifier(**grid, actorder="static")
    return [modifier], {"actorder": "static", "dampening_frac": modifier.dampening_frac}


GPTQMODEL_SETTINGS = ("desc_act", "act_group_aware", "damp_percent", "opt_rotation_epochs",
                      "opt_finetune_epochs", "opt_train_samples", "opt_validation_samples", "opt_batch_size",
                      "krot")


def gptqmodel(model: Path, tokens: torch.Tensor | None, spec: Spec, scratch: Path) -> PeerWeights:
    """GPTQModel: GPTQ, GPTAQ, FOEM, ParoQuant or rounding to nearest, calibrated a window at a time.

    ``options`` of the spec say what of ParoQuant's settings differs. Its weights are those that its rotations
    and scales, which a layer applies to its inputs, make of the stored codes.
    """
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # by its own count too few on two cores
    from gptqmodel import BACKEND, GPTQModel

    config = gptqmodel_config(spec)
    loaded = GPTQModel.load(str(model), config)
    rows = None if tokens is None else [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)}
                                        for row in tokens]
    loaded.quantize(rows, batch_size=1, calibration_sort=None)
    loaded.save(str(scratch))
    layers, weights = list(common.linears(model)), {}
    if spec["method"] == "paroquant":
        weights = rotated(scratch, layers, spec)
    else:
        opened = GPTQModel.load(str(scratch), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
        for name, module in opened.model.named_modules():
            if name in layers:
                module.scales = module.scales.float()
                weights[name] = module.dequantize_weight().T
    settings = {name: getattr(config, name) for name in GPTQMODEL_SETTINGS if hasattr(config, name)}
    return PeerWeights(weights, common.stored_bits(scratch, layers), {"method": spec["method"], **settings})


def gptqmodel_config(spec: Spec) -> Any:
    """Its configuration of a method."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization.config import FOEMConfig, GPTAQConfig, ParoConfig, RTNConfig

    grid = {"bits": spec["bits"], "group_size": spec["group"], "sym": spec["symmetric"], "device": "cpu"}
    if spec["method"] == "rtn":
        return RTNConfig(**grid)
    if spec["method"] == "paroquant":
        return ParoConfig(**grid, **spec["options"])
    corrections = {"gptaq": GPTAQConfig, "foem": FOEMConfig}
    correction = {name: make() for name, make in corrections.items() if name == spec["method"]}
    return QuantizeConfig(**grid, act_group_aware=spec["group"] > 0, **correction)  # which is of groups


def rotated(folder: Path, layers: list[str], spec: Spec) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint in ParoQuant's format, which no kernel of its own runs on a CPU."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.paroquant import apply_paroquant_rotation_reference

    weights = {}
    for layer, stored in common.parts_of(folder, layers).items():
        columns = stored["theta"].shape[-1] * 2
        group = spec["group"] if spec["group"] > 0 else columns
        weight = dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"].float(), spec["bits"],
                                 group)
        inputs = apply_paroquant_rotation_reference(
            torch.eye(columns), stored["pairs"], stored["theta"].float(),
            scales=stored["channel_scales"].float(), group_size=group)
        weights[layer] = (inputs @ weight).T
    return weights


def autoround(model: Path, tokens: torch.Tensor | None, spec: Spec, scratch: Path) -> PeerWeights:
    """AutoRound: signed gradient descent on rounding and ranges, eight windows at a time; without tokens on
    the text that it takes by itself. With ``iters`` 0 and ``plain`` that is rounding to nearest, without
    any."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    settings = {"iters": spec.get("iters", 200)}
    settings |= {"lr": spec["lr"]} if "lr" in spec else {}
    settings |= {"disable_opt_rtn": True} if spec.get("plain") else {}
    data: dict[str, Any] = {}
    if tokens is not None:
        settings |= {"batch_size": min(8, len(tokens))}
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
        data = {"dataset": torch.utils.data.DataLoader(rows, batch_size=1), "nsamples": len(tokens),
                "seqlen": tokens.shape[1]}
    rounding = AutoRound(loaded, tokenizer=tokenizer, bits=spec["bits"], group_size=spec["group"],
                         sym=spec["symmetric"], device_map="cpu", **data, **settings)
    quantized, _ = rounding.quantize()
    layers = list(common.linears(model))
    weights = {name: module.weight.detach().float().clone() for name, module in quantized.named_modules()
               if name in layers}
    # its own choice for 4 bits without symmetry is a packing that its last release fails to make
    layout = "auto_round" if spec["symmetric"] else "auto_round:auto_gptq"
    rounding.save_quantized(str(scratch), format=layout)
    return PeerWeights(weights, common.stored_bits(scratch, layers), settings)


PACKAGES: dict[Callable[..., PeerWeights], tuple[str, ...]] = {
    hqq: ("hqq",), sinq: ("sinq",),
    llmcompressor: ("llmcompressor", "compressed-tensors", "auto-round", "transformers"),
    gptqmodel: ("gptqmodel", "transformers"), autoround: ("auto-round", "transformers")}
"""What quantizes with a tool, called as the tool is, and the packages whose versions are told."""


if __name__ == "__main__":
    make = {function.__name__: function for function in PACKAGES}[json.loads(sys.argv[4])["tool"]]
    common.main(make, PACKAGES[make])
