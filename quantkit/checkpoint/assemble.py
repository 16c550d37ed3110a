"""Assembles units into the files of a checkpoint, and checks them before the manifest is written."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.card import model_card
from quantkit.checkpoint.durable import hash_file, write_file
from quantkit.checkpoint.integrity import BlockHashes, plain_faults, value_faults
from quantkit.checkpoint.manifest import MANIFEST, FileRecord, LayerRow, Manifest, is_plain_name
from quantkit.checkpoint.quantization_config import KEYS, config_words
from quantkit.checkpoint.reader import CARD, CONFIG, GPTQ_CONFIG, INDEX, Checkpoint
from quantkit.checkpoint.shards import StoredTensor, index_json, shard_chunks, shard_names, split
from quantkit.sources.causal_lm import text_config
from quantkit.support.errors import CheckpointError

AROUND = "around."
"""Begins, in a unit, names of tensors that aren't the text model's but of the model around it."""
OWN_FILES = frozenset({CONFIG, CARD, INDEX, MANIFEST, GPTQ_CONFIG})


def assemble(folder: Path, tensors: Sequence[StoredTensor], rows: Sequence[LayerRow],
             config: Mapping[str, Any], side_files: Mapping[str, bytes], manifest: Manifest,
             shard_bytes: int) -> str:
    """Fill an empty folder with a whole, verified checkpoint.

    Args:
        folder: empty. Its ``config.json`` is written last: without one, no engine reads a folder.
        tensors: every tensor, where it lies now, in the order wanted.
        rows: every Linear, in the model's order.
        config: the model's ``config.json``; what it says of quantization is replaced.
        side_files: by plain name.
        manifest: completed here with ``rows`` and the hashes of all files.
        shard_bytes: largest size of a weight file.

    Returns:
        sha256 of ``quantkit.json``.

    Raises:
        CheckpointError: names collide or aren't plain, or what was reread is not what was written.
        OSError: the disk is full or fails.
    """
    manifest = manifest.model_copy(update={"layers": tuple(rows)})
    if (outer := manifest.outer) is not None:
        tensors = [replace(tensor, name=tensor.name.removeprefix(AROUND) if tensor.name.startswith(AROUND)
                           else outer.file_name(tensor.name)) for tensor in tensors]
    _check_names(tensors, rows, side_files)
    words = config_words(manifest.stored_layers, manifest.quantkit_version, manifest.layer_prefix)
    plain = {key: value for key, value in config.items() if key not in KEYS} | words
    described = plain if outer is None else text_config("the model", plain) | words
    written: dict[str, tuple[str, int]] = {}
    blocks: dict[str, str] = {}
    shards = split(tensors, shard_bytes)
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        hashes = BlockHashes()
        written[name] = write_file(folder / name, hashes.of(shard_chunks(shard)))
        blocks[name] = hashes.digits()
    if len(shards) > 1:
        written[INDEX] = write_file(folder / INDEX, [index_json(shards)])
    text = _text(plain)
    written[CONFIG] = (hashlib.sha256(text).hexdigest(), len(text))
    quantization = words.get("quantization_config", {})
    if quantization.get("quant_method") == "gptq":
        written[GPTQ_CONFIG] = write_file(folder / GPTQ_CONFIG, [_text(quantization)])
    for name, content in sorted(side_files.items()):
        written[name] = write_file(folder / name, [content])
    written[CARD] = write_file(folder / CARD, [model_card(manifest, described)])
    records = {name: FileRecord(sha256=digest, bytes=size, blocks=blocks.get(name, ""))
               for name, (digest, size) in written.items()}
    manifest = manifest.model_copy(update={"files": records})
    _reread(folder, manifest, plain, {tensor.name for tensor in tensors})
    digest, _ = write_file(folder / MANIFEST, [manifest.to_bytes()])
    write_file(folder / CONFIG, [text])
    _same(folder / CONFIG, records[CONFIG])
    return digest


def _text(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def _check_names(tensors: Sequence[StoredTensor], rows: Sequence[LayerRow],
                 side_files: Mapping[str, bytes]) -> None:
    for kind, names in (("tensor", [t.name for t in tensors]), ("layer", [r.name for r in rows])):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise CheckpointError(f"{kind} {twice[0]} is in two units", why="each belongs to one")
    for name in side_files:
        if not is_plain_name(name) or name in OWN_FILES or name.endswith(".safetensors"):
            raise CheckpointError(f"the source's file {name!r} can't be copied",
                                  why="it is not a plain file name, or one that the checkpoint itself uses")


def _same(path: Path, record: FileRecord) -> None:
    """Raise CheckpointError unless the disk holds what was written."""
    if hash_file(path) != (record.sha256, record.bytes):
        raise CheckpointError(f"{path} is not what was written", why="the disk or memory is faulty",
                              next="check the disk, then run the same command again")


def _reread(folder: Path, manifest: Manifest, config: Mapping[str, Any], names: set[str]) -> None:
    """Everything that was written so far, from the disk. Raises CheckpointError for the first fault."""
    for name, record in manifest.files.items():
        if name != CONFIG:
            _same(folder / name, record)
    with Checkpoint(folder, manifest, config) as checkpoint:
        checkpoint.check_structure()
        if odd := names ^ checkpoint.stored_names:
            raise CheckpointError(f"{folder} holds other tensors than were written",
                                  why=", ".join(sorted(odd)[:3]))
        for fault in value_faults(checkpoint):
            raise CheckpointError(f"layer {fault}",
                                  why="the checkpoint would give wrong results, so it was not written",
                                  next="quantize this layer by another method, or keep it with method: null")
        for fault in plain_faults(checkpoint):
            raise CheckpointError(fault, next="get the model again, then quantize it to another --out",
                                  why="the checkpoint would give wrong results, so it was not written")
