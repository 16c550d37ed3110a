"""A checkpoint of gpt-oss → a folder as OpenAI publishes it (``quant_method: mxfp4``), for other engines.

Codes, scales and all other tensors are the checkpoint's; they only lie elsewhere: those of a layer's experts
together, as :mod:`~quantkit.sources.split_experts` says. What is made has no ``quantkit.json``, because a
manifest is of layers, and these aren't stored one by one; quantkit reads it as it reads the published files.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.durable import TEMPORARY, rename, write_file
from quantkit.checkpoint.manifest import LayerRow
from quantkit.checkpoint.open import AnyCheckpoint, open_checkpoint, open_quantized
from quantkit.checkpoint.quantization_config import KEYS
from quantkit.checkpoint.reader import CONFIG, INDEX, Checkpoint
from quantkit.checkpoint.shards import LazyTensor, index_json, shard_names, stored_tensors, tensor_chunks
from quantkit.export.layouts import check_absent, check_intact, check_layers, room_for
from quantkit.models.architecture import EXPERT, layer_of
from quantkit.models.loadable import check_loadable
from quantkit.sources.base import TensorInfo
from quantkit.sources.split_experts import FAMILIES, LAYOUTS, fused
from quantkit.support.errors import CheckpointError, UsageError
from quantkit.support.paths import typed_path
from quantkit.support.progress import Listener, ProgressEvent, silent

GPT_OSS = "gpt-oss"
"""What ``--to`` calls it."""
MXFP4 = "mxfp4-pack-quantized"
KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
SIZE = 32
"""Weights that share a scale."""
EXPERTS_ALONE = ("quantize the original by a recipe whose rules are method: gptq with kind: fp, bits: 4, "
                 "groups of 32 and scale_dtype: e8m0 for '*.experts.*', and method: null for '*'")


@dataclass(frozen=True)
class FolderResult:
    """What an export made.

    Attributes:
        out: the folder that was made.
        experts: Linears in MXFP4.
        bytes: the size of the weight files.
        seconds: the time that the export took.
    """

    out: Path
    experts: int
    bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"out": str(self.out), "format": GPT_OSS, "seconds": self.seconds, "experts": self.experts,
                "bytes": self.bytes}


def export_gpt_oss(uri: str, out: str | Path, *, revision: str | None = None,
                   progress: Listener = silent) -> FolderResult:
    """Write a checkpoint of gpt-oss in OpenAI's layout.

    Args:
        uri: a checkpoint, of quantkit or another tool, here or on the hub.
        out: the folder to make; nothing may be there.
        revision: commit or tag, of a checkpoint on the hub.
        progress: called before each file and once at the end.

    Raises:
        UsageError: it isn't quantized, or of another family.
        SpecError: the layout can't hold a layer's spec: only experts can be quantized there, to MXFP4.
        CheckpointError: something is at ``out``, a file of the checkpoint is damaged, or the disk is full or
            can't be written. Nothing is left then, nor after an interruption.
    """
    start, path = time.monotonic(), typed_path(out)
    check_absent(path)
    opened = open_quantized(uri, revision, "RECIPE")
    try:
        config = check_loadable(uri, opened.config(), opened.infos, opened.side_files(), opened.layers,
                                error=CheckpointError).config
        if config.model_type not in FAMILIES:
            raise UsageError(f"{uri} is a {config.model_type} model", next="choose another --to",
                             why=f"the layout {GPT_OSS} is for {', '.join(FAMILIES)} models")
        plain = _plain_layers(opened)
        if isinstance(opened, Checkpoint):
            check_intact(opened)
        files = _files(opened, config.num_layers)
        size = _write(path, opened, files, plain, progress)
        return FolderResult(path, sum(row.spec is not None for row in opened.layers), size,
                            time.monotonic() - start)
    finally:
        opened.close()


def _plain_layers(checkpoint: AnyCheckpoint) -> list[str]:
    """Modules of experts that aren't quantized. Raises SpecError for all that the layout can't hold."""
    refused, modules = [], dict[str, set[bool]]()
    for row in checkpoint.layers:
        module, expert, _ = row.name.partition(EXPERT)
        if expert:
            modules.setdefault(f"{module}.experts", set()).add(row.spec is not None)
        if row.spec is None:
            continue
        if not expert:
            refused.append(f"{row.name} is quantized, and only experts can be")
        elif row.format != MXFP4 or row.spec.activations:
            refused.append(f"{row.name} is {row.spec.label()} by {row.format}")
    refused += [f"{module}: some are quantized, and some aren't" for module, kinds in modules.items()
                if len(kinds) > 1]
    if not any(True in kinds for kinds in modules.values()):
        refused.append("no expert is quantized")
    check_layers(checkpoint, f"the layout {GPT_OSS}", refused, EXPERTS_ALONE)
    return [module for module, kinds in modules.items() if kinds == {False}]


def _files(checkpoint: AnyCheckpoint, layers: int) -> list[dict[str, LazyTensor]]:
    """The tensors of each file: one a layer, and one for what is in none."""
    files: list[dict[str, LazyTensor]] = [{} for _ in range(layers + 1)]
    experts: dict[str, list[LayerRow]] = {}
    for row in checkpoint.layers:
        module, expert, name = row.name.partition(EXPERT)
        if expert:
            experts.setdefault(f"{module}.experts.{name.partition('.')[2]}", []).append(row)
    for name, info in checkpoint.infos.items():
        if EXPERT not in name:
            index = layer_of(name, layers)
            files[layers if index is None else index][name] = LazyTensor(
                info, partial(checkpoint.tensor, name))
    for name, rows in experts.items():
        if name.endswith(".up_proj"):
            continue
        index = layer_of(name, layers)
        assert index is not None
        gates = name.endswith(".gate_proj")
        others = experts[name.replace(".gate_proj", ".up_proj")] if gates else []
        together = name.replace(".gate_proj", ".gate_up_proj")
        files[index] |= {f"{together}{suffix}": tensor
                         for suffix, tensor in _joined(checkpoint, together, rows, others)}
    return files


def _joined(checkpoint: AnyCheckpoint, name: str, rows: Sequence[LayerRow],
            others: Sequence[LayerRow]) -> Iterator[tuple[str, LazyTensor]]:
    """A projection of all experts of a layer, by suffix; ``others``: the up projections beside gates."""
    first = rows[0]
    count = len(rows)
    outputs = first.shape[0] * (1 + bool(others))
    inputs = first.shape[1]

    def lazy(suffix: str, shape: tuple[int, ...], dtype: torch.dtype,
             read: Callable[[str], torch.Tensor]) -> tuple[str, LazyTensor]:
        def joined() -> torch.Tensor:
            parts = [torch.stack([read(row.name) for row in part]) for part in (rows, others) if part]
            return fused(parts, LAYOUTS[FAMILIES[0]], weight=suffix == "").contiguous()

        return suffix, LazyTensor(TensorInfo(f"{name}{suffix}", shape, dtype), joined)

    def stored(suffix: str, part: str) -> torch.Tensor:
        packed = checkpoint.quantized(part)
        assert packed is not None
        tensor = packed.tensors[suffix]
        return tensor.view(tensor.shape[0], -1, SIZE // 2) if suffix == "weight_packed" else tensor

    def plain(suffix: str, part: str) -> torch.Tensor:
        return checkpoint.tensor(f"{part}.{suffix}")

    bias = checkpoint.infos[f"{first.name}.bias"].dtype
    yield lazy("_bias", (count, outputs), bias, partial(plain, "bias"))
    if first.spec is None:
        weight = checkpoint.infos[f"{first.name}.weight"].dtype
        yield lazy("", (count, inputs, outputs), weight, partial(plain, "weight"))
        return
    groups = inputs // SIZE
    yield lazy("_blocks", (count, outputs, groups, SIZE // 2), torch.uint8, partial(stored, "weight_packed"))
    yield lazy("_scales", (count, outputs, groups), torch.uint8, partial(stored, "weight_scale"))


def _write(path: Path, checkpoint: AnyCheckpoint, files: Sequence[Mapping[str, LazyTensor]],
           plain: Sequence[str], progress: Listener) -> int:
    """Write the folder, and open it once before it gets its name; bytes of the weights."""
    folder = path.with_name(path.name + TEMPORARY)
    config = {key: value for key, value in checkpoint.config().items() if key not in KEYS} | {
        "quantization_config": {"modules_to_not_convert": [*KEPT, *plain], "quant_method": "mxfp4"}}
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} can't be made", why=error.strerror or str(error),
                              next="choose another --out, in a folder that you may write to") from error
    total = sum(tensor.info.nbytes for file in files for tensor in file.values())
    try:
        with room_for(path, folder, total):
            names = shard_names(len(files))
            for index, (name, tensors) in enumerate(zip(names, files)):
                progress(ProgressEvent(index, len(files), name))
                write_file(folder / name, tensor_chunks(tensors))
                checkpoint.release()
            write_file(folder / INDEX, [index_json([stored_tensors(folder / name) for name in names])])
            for name, content in checkpoint.side_files().items():
                write_file(folder / name, [content])
            write_file(folder / CONFIG, [(json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()])
            with open_checkpoint(folder) as again:
                check_loadable(str(path), again.config(), again.infos, again.side_files(), again.layers,
                               error=CheckpointError)
            rename(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    progress(ProgressEvent(len(files), len(files), "the folder is complete"))
    return total
