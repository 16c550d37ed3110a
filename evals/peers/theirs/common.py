"""What is alike for every peer. It runs in environments that have no quantkit.

``weights.py`` is called as ``PYTHON SCRIPT MODEL TOKENS OUT SPEC``: a plain model folder, the calibration's
tokens (safetensors, ``tokens`` int64 ``[windows, tokens]``; ``-`` for whatever the tool does without any), a
folder to make, and ``{"tool", "bits", "group", "symmetric"}`` as JSON (``group`` -1: a row). It writes the
model again with the weights that its codes stand for, in float32, and prints ``made {"bits_per_weight",
"versions", "settings"}``.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


class PeerWeights(NamedTuple):
    """Weights by layer, float32, and the norms that a method changed; bits that all layers take on disk; and
    settings worth telling."""

    weights: dict[str, torch.Tensor]
    bits: float
    settings: dict[str, Any]


def main(make: Callable[[Path, torch.Tensor | None, dict[str, Any], Path], PeerWeights],
         packages: Iterable[str]) -> None:
    """Run a peer. ``make(model, tokens, spec, scratch)`` quantizes."""
    model, out = Path(sys.argv[1]), Path(sys.argv[3])
    tokens = None if sys.argv[2] == "-" else load_file(sys.argv[2])["tokens"]
    scratch = out.with_name(out.name + ".scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    made = PeerWeights(*make(model, tokens, json.loads(sys.argv[4]), scratch))
    shutil.rmtree(scratch, ignore_errors=True)
    names = set(linears(model))
    matrices = {name: weight for name, weight in made.weights.items() if weight.dim() == 2}
    if set(matrices) != names:
        sys.exit(f"quantized other layers than asked: {sorted(set(matrices) ^ names)[:4]}")
    save_plain(model, out, made.weights)
    print("made", json.dumps({
        "bits_per_weight": made.bits / sum(weight.numel() for weight in matrices.values()),
        "settings": made.settings,
        "versions": {name: importlib.metadata.version(name) for name in (*packages, "torch")}}))


def linears(model: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the layers that are quantized: every matrix of a decoder layer, not embedding and head."""
    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items()
            if ".layers." in name and len(shape) == 2}


def save_plain(model: Path, out: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """The model in float32 with other weights."""
    tensors = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    for layer, weight in weights.items():
        before = tensors[f"{layer}.weight"]
        if weight.shape != before.shape or not bool(weight.isfinite().all()):
            sys.exit(f"{layer}: {tuple(weight.shape)} for {tuple(before.shape)}, or not finite")
        tensors[f"{layer}.weight"] = weight.detach().float().contiguous()
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, part / name)
    config = json.loads((part / "config.json").read_text(encoding="utf-8"))
    config |= {"torch_dtype": "float32"}
    (part / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    part.rename(out)


def parts_of(folder: Path, layers: Iterable[str]) -> dict[str, dict[str, torch.Tensor]]:
    """What a saved checkpoint holds of each of these layers, by the last part of a tensor's name."""
    parts: dict[str, dict[str, torch.Tensor]] = {layer: {} for layer in layers}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            layer, _, part = name.rpartition(".")
            if layer in parts:
                parts[layer][part] = tensor
    return parts


def stored_bits(folder: Path, layers: Iterable[str]) -> float:
    """Of everything that a saved checkpoint holds for these layers: codes, scales, zero points, orders."""
    bits = 0
    for layer, stored in parts_of(folder, layers).items():
        if "weight" in stored:
            sys.exit(f"{layer} was left as it is")
        bits += 8 * sum(tensor.nbytes for tensor in stored.values())
    return bits
