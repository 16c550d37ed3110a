"""A checkpoint → one GGUF file, with the same codes and scales, or not at all.

A model that isn't quantized becomes one of bfloat16, float16 or float32, as it is stored.

Everything that can be told without a file is told before one is begun: the model's keys, the tokenizer's, and
for each layer the type of llama.cpp's that holds it exactly. The values are written a tensor at a time into a
temporary neighbor, which gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.checkpoint.durable import TEMPORARY, write_file
from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_model, open_quantized
from quantkit.checkpoint.reader import Checkpoint
from quantkit.export.gguf.blocks import reason_against
from quantkit.export.gguf.file import ALIGNMENT, FileTensor, Value, header_bytes
from quantkit.export.gguf.model_keys import ModelKeys, model_keys
from quantkit.export.gguf.tensors import (
    OUTSIDE,
    Exportable,
    PlainModel,
    PlannedTensor,
    planned_tensors,
    tensor_bytes,
    visited,
    with_types,
)
from quantkit.export.gguf.tokenizer_keys import tokenizer_keys
from quantkit.export.layouts import check_absent, check_intact, check_layers, checkpoint_name, room_for
from quantkit.models.loadable import check_loadable
from quantkit.sources.base import quantized_types
from quantkit.sources.gguf_tokenizer import PHI3
from quantkit.support.errors import CheckpointError, UsageError
from quantkit.support.paths import typed_path
from quantkit.support.progress import Listener, Phases, ProgressEvent, silent

GGUF = "gguf"
"""What ``--to`` calls it."""
QUANTIZATION_VERSION = 2
"""Of the layouts of llama.cpp's blocks."""
_FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_M", "Q5_K": "MOSTLY_Q5_K_M", "Q3_K": "MOSTLY_Q3_K_M",
               "MXFP4": "MOSTLY_MXFP4_MOE"}
"""``general.file_type``, where it isn't ``MOSTLY_`` and the type."""


@dataclass(frozen=True)
class GGUFResult:
    """What an export made.

    Attributes:
        out: the file that was made.
        tensors: its tensors, in order.
        bytes: the size of the file.
        sha256: the hash of the file.
        notes: sentences about what programs will do otherwise than quantkit.
        seconds: the time that the export took.
    """

    out: Path
    tensors: tuple[FileTensor, ...]
    bytes: int
    sha256: str
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"out": str(self.out), "format": GGUF, "seconds": self.seconds, "bytes": self.bytes,
                "sha256": self.sha256, "notes": list(self.notes),
                "tensors": [{"name": tensor.name, "type": tensor.kind, "shape": list(tensor.shape),
                             "bytes": tensor.nbytes} for tensor in self.tensors]}


def export_gguf(uri: str, out: str | Path, *, revision: str | None = None,
                progress: Listener = silent) -> GGUFResult:
    """Write a checkpoint, or a model that isn't quantized, as one GGUF file.

    Args:
        uri: a checkpoint, of quantkit or another tool, or a model, here or on the hub.
        out: the file to make, ``.gguf``; nothing may be there.
        revision: commit or tag, of a checkpoint on the hub.
        progress: called before each tensor, first while they are checked, then while they are written.

    Raises:
        UsageError: it is a quantized GGUF file already, or ``out`` can't be such a file's name.
        UnsupportedModelError: llama.cpp has no such model or tokenizer.
        SpecError: llama.cpp has no type for a layer's spec or shape.
        CheckpointError: no type holds a layer exactly, a file of the checkpoint is damaged, or the disk is
            full or can't be written. Nothing is left then, nor after an interruption.
    """
    start, path = time.monotonic(), _target(out)
    phases = Phases(progress, ("checking tensors", "writing tensors"))
    opened = _open(uri, revision)
    try:
        loadable = check_loadable(uri, opened.config(), opened.infos, opened.side_files(), opened.layers,
                                  error=CheckpointError)
        refused = [f"{row.name}: {reason}" for row in opened.layers
                   if row.spec is not None and row.format and row.name not in OUTSIDE
                   and (reason := reason_against(row.format, row.spec, row.shape)) is not None]
        if not isinstance(opened, PlainModel):
            check_layers(opened, "llama.cpp", refused,
                         "quantize the original by a recipe with format: gguf-q4_k, or gguf-q8_0")
        model = model_keys(loadable.config)
        tokenizer = tokenizer_keys(loadable.tokenizer, loadable.config.vocab_size)
        planned = planned_tensors(loadable.config, model.family)
        if isinstance(opened, Checkpoint):
            check_intact(opened)
        planned = with_types(planned, opened, phases("checking tensors"))
        tables = [FileTensor(name, "F32", tuple(table.shape)) for name, table in model.tables.items()]
        tensors = (*tables, *(tensor.file for tensor in planned))
        name = _model_name(checkpoint_name(uri), tokenizer.strips_space)
        metadata = _general(opened, name, planned) | model.values | tokenizer.values
        header = header_bytes(metadata, tensors)
        total = len(header) + sum(tensor.nbytes + tensor.padding for tensor in tensors)
        digest = _write(path, total, _chunks(header, model, planned, opened, phases("writing tensors")))
        return GGUFResult(path, tensors, total, digest,
                          (*model.notes, *tokenizer.notes, *_kv_notes(opened)), time.monotonic() - start)
    finally:
        opened.close()


def _open(uri: str, revision: str | None) -> Exportable:
    opened = open_model(uri, revision)
    if isinstance(opened, Checkpoint | ForeignCheckpoint):
        return opened
    if not quantized_types(opened):
        return PlainModel(opened)
    opened.close()
    return open_quantized(uri, revision, "int8")  # which says why it can't be


def _target(out: str | Path) -> Path:
    """The file's path. Raises UsageError, or CheckpointError if something is there."""
    path = typed_path(out)
    if path.suffix.lower() != ".gguf" or not path.stem:
        raise UsageError(f"{str(out)[:200]} is no name of a GGUF file", why="it must end in .gguf",
                         next="--out MODEL.gguf")
    check_absent(path)
    return path


def _kv_notes(checkpoint: Exportable) -> list[str]:
    setting = checkpoint.manifest.recipe.get("kv") if checkpoint.manifest else None
    return [f"the KV setting {setting} isn't in the file: llama.cpp has its own options"] if setting else []


def _model_name(name: str, strips_space: bool) -> str:
    """A name from which llama.cpp tells what it otherwise can't: whether control tokens are Phi-3's."""
    if strips_space:
        return name if PHI3.search(name) else f"{name} (Phi-3)"
    return PHI3.sub("Phi 3", name)


def _general(checkpoint: Exportable, name: str, tensors: Sequence[PlannedTensor]) -> dict[str, Value]:
    """What the file is, and where it comes from."""
    from gguf.constants import LlamaFileType

    weights: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.index is not None and len(tensor.file.shape) > 1:
            weights[tensor.file.kind] += tensor.file.nbytes
    (kind, _), = weights.most_common(1)
    names = LlamaFileType.__members__
    file_type = names.get(_FILE_TYPES.get(kind, f"MOSTLY_{kind}"), LlamaFileType.GUESSED)
    general: dict[str, Value] = {
        "general.type": "model", "general.name": name,
        "general.quantized_by": f"quantkit {__version__}", "general.file_type": int(file_type),
        "general.quantization_version": QUANTIZATION_VERSION, "quantkit.version": __version__}
    if isinstance(checkpoint, PlainModel):
        return general
    if not isinstance(checkpoint, Checkpoint):
        config = checkpoint.config().get("quantization_config") or {}
        return general | {"quantkit.quant_method": str(config.get("quant_method"))}
    manifest = checkpoint.manifest
    general |= {"quantkit.quantization.recipe": str(manifest.recipe.get("name") or ""),
                "quantkit.manifest_sha256": hashlib.sha256(manifest.to_bytes()).hexdigest(),
                "quantkit.source": manifest.source.uri}
    if manifest.source.revision is not None:
        general["quantkit.source_revision"] = manifest.source.revision
    return general


def _chunks(header: bytes, model: ModelKeys, tensors: Sequence[PlannedTensor], checkpoint: Exportable,
            progress: Listener) -> Iterator[bytes | memoryview]:
    yield header
    for table in model.tables.values():
        raw = table.numpy().tobytes()
        yield raw + bytes(-len(raw) % ALIGNMENT)
    for tensor in visited(tensors, checkpoint, progress):
        yield from tensor_bytes(tensor, checkpoint)
    progress(ProgressEvent(len(tensors), len(tensors), "the file is complete"))


def _write(path: Path, total: int, chunks: Iterator[bytes | memoryview]) -> str:
    """Write the file; its sha256. Nothing is left if that fails."""
    try:
        with room_for(path, path.parent, total, "the file"):
            digest, size = write_file(path, chunks)
            assert size == total
            return digest
    finally:
        with contextlib.suppress(OSError):
            path.with_name(path.name + TEMPORARY).unlink()
