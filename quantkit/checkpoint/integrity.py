"""Finds damage: in a bounded number of bytes before a model is loaded, in all of them, or in the values.

A manifest has the sha256 of every file. Of weight files it also has a short hash of every block, so that a
file can be checked in places. Damage to a checkpoint of up to 64 MiB is always found when it is loaded; in
the weights of a larger one, the larger the damaged part is, the likelier. Packed weights of any format are
checked through the format's own unpacking.
"""

from __future__ import annotations

import hashlib
import itertools
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantkit.checkpoint.durable import hash_file
from quantkit.checkpoint.manifest import BLOCK, BLOCK_DIGITS, FileRecord, Manifest
from quantkit.checkpoint.reader import CARD, Checkpoint
from quantkit.checkpoint.shards import stored_tensors
from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.plugins.manager import registry
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.support.paths import open_regular, reading
from quantkit.support.progress import Listener, ProgressEvent, silent

SAMPLE = 64 * 2**20
"""Bytes that loading reads to look for damage: less than a fifth of a second's work."""
_PIECE = 2**22
Status = Literal["ok", "failed", "note"]


class BlockHashes:
    """Hashes the blocks of what passes through :meth:`of`."""

    def __init__(self) -> None:
        self._digits: list[str] = []
        self._open, self._size = hashlib.sha256(), 0

    def of(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The same chunks, unchanged."""
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            while len(rest):
                part = rest[:BLOCK - self._size]
                self._open.update(part)
                self._size, rest = self._size + len(part), rest[len(part):]
                if self._size == BLOCK:
                    self._close()
            yield chunk

    def digits(self) -> str:
        """For :attr:`FileRecord.blocks`, after the last chunk."""
        if self._size:
            self._close()
        return "".join(self._digits)

    def _close(self) -> None:
        self._digits.append(self._open.hexdigest()[:BLOCK_DIGITS])
        self._open, self._size = hashlib.sha256(), 0


def check_sample(checkpoint: Checkpoint, limit: int = SAMPLE) -> None:
    """Look for damage in ``limit`` bytes: everything in a checkpoint that isn't larger. Of a larger one the
    files that aren't weights are read whole, the smallest first, as long as ``limit`` allows; what is left of
    it goes to blocks of the weights, at least one, at even distances, always the same ones. Weights that were
    written before blocks were hashed are not checked.

    Raises:
        CheckpointError: a file is damaged; it names the file and the tensor.
    """
    manifest, folder = checkpoint.manifest, checkpoint.path
    files = {name: record for name, record in sorted(manifest.files.items()) if name != CARD}
    everything = sum(record.bytes for record in files.values()) <= limit
    for name, record in sorted(files.items(), key=lambda item: item[1].bytes):
        if not name.endswith(".safetensors") and record.bytes <= limit:
            limit -= record.bytes
            with reading(folder / name, CheckpointError):
                digest, _ = hash_file(folder / name)
            if digest != record.sha256:
                raise _damaged(folder, manifest, name)
    blocks = [(name, index) for name, record in files.items() for index in range(record.block_count)]
    # of several files the last blocks are short: bytes alone don't say how many blocks are all
    count = len(blocks) if everything else min(len(blocks), max(1, -(-limit // BLOCK)))
    for at in range(count):
        name, index = blocks[at * len(blocks) // count]
        if not _is_intact(folder / name, manifest.files[name], index):
            raise _damaged(folder, manifest, name, index)


def check_files(checkpoint: Checkpoint, progress: Listener = silent) -> None:
    """Hash every file but the model card.

    Args:
        checkpoint: to be checked.
        progress: told of every few megabytes, in MiB.

    Raises:
        CheckpointError: a file is damaged; it names the file, and the tensor where blocks were hashed.
    """
    manifest, folder = checkpoint.manifest, checkpoint.path
    files = {name: record for name, record in sorted(manifest.files.items()) if name != CARD}
    total, done = max(1, sum(record.bytes for record in files.values()) // BLOCK), 0

    def tell(label: str, piece: int = 0) -> None:
        nonlocal done
        done += piece
        progress(ProgressEvent(done // BLOCK, total, label, unit="MiB"))

    for name, record in files.items():
        digest = hashlib.sha256()
        tell(name)
        for piece in _pieces(folder / name):
            digest.update(piece)
            tell(name, len(piece))
        if digest.hexdigest() != record.sha256:
            bad = next((index for index in range(record.block_count)
                        if not _is_intact(folder / name, record, index)), None)
            raise _damaged(folder, manifest, name, bad)
    progress(ProgressEvent(total, total, "verified", unit="MiB"))


def _is_intact(path: Path, record: FileRecord, index: int) -> bool:
    """Whether a block's bytes are those that were written."""
    with reading(path, CheckpointError), open_regular(path) as file:
        file.seek(index * BLOCK)
        block = file.read(BLOCK)
    start = index * BLOCK_DIGITS
    return hashlib.sha256(block).hexdigest()[:BLOCK_DIGITS] == record.blocks[start:start + BLOCK_DIGITS]


def _pieces(path: Path) -> Iterator[bytes]:
    with reading(path, CheckpointError), open_regular(path) as file:
        while piece := file.read(_PIECE):
            yield piece


def _damaged(folder: Path, manifest: Manifest, name: str, index: int | None = None) -> CheckpointError:
    """The error for a file, or a block of it."""
    where, reason = f"{folder / name}", "its bytes are not those that were written: its sha256 differs"
    if index is not None:
        reason = f"bytes {index * BLOCK:,} and following are not those that were written"
        if tensors := _tensors_at(folder / name, index):
            where += f", {tensors},"
    source, recipe = manifest.source.uri, manifest.recipe.get("name")
    made = (f"quantkit quantize {shlex.quote(source)} --recipe {shlex.quote(str(recipe))} --out OUT"
            if manifest.exported is None else f"quantkit export {shlex.quote(manifest.exported.uri)} …")
    return CheckpointError(f"{where} is damaged", why=reason,
                           next=f"quantkit verify {shlex.quote(str(folder))} finds all damage; then copy the "
                                f"checkpoint again from where it came, or make it anew: {made}")


def _tensors_at(path: Path, index: int) -> str | None:
    """``tensor NAME``, or the first of several; ``None`` if the file's header can't say it."""
    try:
        tensors = sorted(stored_tensors(path), key=lambda tensor: tensor.offset)
    except (OSError, QuantkitError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None
    inside = [tensor.name for tensor in tensors if tensor.offset < (index + 1) * BLOCK
              and tensor.offset + tensor.nbytes > index * BLOCK]
    if not inside:
        return None
    return f"tensor {inside[0]}" if len(inside) == 1 else f"tensors {inside[0]} to {inside[-1]}"


@dataclass(frozen=True)
class VerifyCheck:
    """One thing looked at. ``detail`` says what was found; a ``note`` is nothing wrong."""

    name: str
    status: Status
    detail: str = ""


def value_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence for every quantized layer whose stored values can't be right, one layer in memory
    at a time: scales that aren't finite, codes or zero points out of range, unreadable tensors."""
    for row in checkpoint.manifest.layers:
        try:
            packed = checkpoint.quantized(row.name)
            fault = packed_fault(packed) if packed is not None else None
        except QuantkitError as error:
            fault = " ".join(filter(None, (error.what, error.why)))
        checkpoint.release()
        if fault is not None:
            yield f"{row.name}: {fault}"


def plain_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence for every tensor outside of the quantized weights (norms, embeddings, biases, routers,
    Linears that stay as they are) that holds NaN or infinite values, one tensor in memory at a time."""
    quantized = {row.name for row in checkpoint.manifest.layers if row.spec is not None}
    for name in checkpoint.infos:
        parents = itertools.accumulate(name.split("."), "{}.{}".format)
        if not name.endswith(".bias") and not quantized.isdisjoint(parents):
            continue
        try:
            checkpoint.tensor(name)
        except QuantkitError as error:
            yield error.what
        checkpoint.release()


def packed_fault(packed: QuantizedTensor) -> str | None:
    """What is wrong with the values of one packed weight; ``None`` if nothing. That its floats are finite was
    checked when they were read."""
    if (shape := packed.tensors.get("weight_shape")) is not None and shape.tolist() != list(packed.shape):
        return f"weight_shape says {shape.tolist()}, the layer is {list(packed.shape)}"
    form: Format = registry("formats").get(packed.format)
    codes: Codes = form.unpack(packed)
    return codes.fault(packed.shape)
