"""Rereads a whole checkpoint and reports, file by file and layer by layer, what is wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.card_block import MAX_BLOCK, without_block
from quantkit.checkpoint.durable import hash_file
from quantkit.checkpoint.integrity import VerifyCheck, plain_faults, value_faults
from quantkit.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from quantkit.checkpoint.quantization_config import KEYS, config_words
from quantkit.checkpoint.reader import CARD, CONFIG, Checkpoint, read_config, read_manifest
from quantkit.kv.build import check_kv
from quantkit.kv.spec import setting_of
from quantkit.models.loadable import check_loadable
from quantkit.support.errors import CheckpointError, QuantkitError


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify` found."""

    path: Path
    checks: tuple[VerifyCheck, ...]

    @property
    def ok(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    @property
    def failed(self) -> tuple[VerifyCheck, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def to_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "ok": self.ok, "checks": [asdict(check) for check in self.checks]}


def verify(path: str | Path) -> VerifyReport:
    """Check every byte and value: file hashes, the manifest's own digest, the structure of every
    layer, all that loading asks for, all numbers finite, codes and zero points in range, ``config.json`` in
    agreement with the manifest, and files that nobody listed. One layer is in memory at a time.

    Raises:
        CheckpointError: ``path`` is no finished quantkit checkpoint at all.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        read_manifest(folder)
    return VerifyReport(folder, tuple(_checks(folder)))


def _checks(folder: Path) -> Iterator[VerifyCheck]:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        yield VerifyCheck(MANIFEST, "failed", _said(error))
        return
    yield VerifyCheck(MANIFEST, "ok", f"{len(manifest.layers)} layers, {len(manifest.files)} files")
    complete = True
    for name in sorted(manifest.files):
        check = _file(folder, name, manifest)
        complete &= check.status == "ok"
        yield check
    unknown = sorted({p.name for p in folder.iterdir()} - manifest.files.keys() - {MANIFEST})
    if unknown:
        yield VerifyCheck("unknown files", "note", ", ".join(unknown))
    if not complete:
        yield VerifyCheck("layers", "note", "not looked at: a file is damaged")
        return
    yield from _content(folder, manifest)


def _file(folder: Path, name: str, manifest: Manifest) -> VerifyCheck:
    record = manifest.files[name]
    try:
        digest, size = hash_file(folder / name)
    except OSError as error:
        return VerifyCheck(name, "failed", error.strerror or str(error))
    if name == CARD and digest != record.sha256 and _has_evaluation(folder / name, record):
        return VerifyCheck(name, "ok",
                           f"{size:,} bytes, with an evaluation; without it sha256 {record.sha256}")
    if size != record.bytes:
        return VerifyCheck(name, "failed", f"{size:,} bytes, it was written with {record.bytes:,}")
    if digest != record.sha256:
        return VerifyCheck(name, "failed", f"sha256 is {digest}, it was written as {record.sha256}")
    return VerifyCheck(name, "ok", f"{size:,} bytes, sha256 {digest}")


def _has_evaluation(card: Path, record: FileRecord) -> bool:
    """Whether it is the card that was written, but for an evaluation in it."""
    with card.open("rb") as file:
        data = file.read(record.bytes + MAX_BLOCK + 1)
    if len(data) > record.bytes + MAX_BLOCK:
        return False
    return hashlib.sha256(without_block(data)).hexdigest() == record.sha256


def _content(folder: Path, manifest: Manifest) -> Iterator[VerifyCheck]:
    try:
        with Checkpoint.open(folder) as checkpoint:
            yield VerifyCheck("structure", "ok", "every layer has the tensors of its format")
            yield _loads(checkpoint)
            faults = [*value_faults(checkpoint), *plain_faults(checkpoint)]
            yield from (VerifyCheck("values", "failed", fault) for fault in faults)
            if not faults:
                yield VerifyCheck("values", "ok", "all numbers finite, codes and zero points in range")
    except QuantkitError as error:
        yield VerifyCheck("structure", "failed", _said(error))
        return
    stored = {key: value for key, value in read_config(folder).items() if key in KEYS}
    if stored == config_words(manifest.stored_layers, manifest.quantkit_version, manifest.layer_prefix):
        yield VerifyCheck(f"{CONFIG} and {MANIFEST}", "ok", "they agree")
    else:
        yield VerifyCheck(f"{CONFIG} and {MANIFEST}", "failed",
                          "its words on quantization don't say what the layers of the manifest are")


def _loads(checkpoint: Checkpoint) -> VerifyCheck:
    """Whether the folder as a whole is a model that can be loaded, asked as loading does."""
    if (outline := checkpoint.manifest.outline) is not None:
        return VerifyCheck("loads", "note",
                           f"not by quantkit, which doesn't know {outline.model_type}: other engines run it")
    try:
        check_loadable(str(checkpoint.path), checkpoint.config(), checkpoint.infos, checkpoint.side_files(),
                       checkpoint.layers, error=CheckpointError)
        check_kv(setting_of(checkpoint.manifest.recipe))
    except QuantkitError as error:
        return VerifyCheck("loads", "failed", _said(error))
    return VerifyCheck("loads", "ok", "config.json, tensors and tokenizer are those of one model")


def _said(error: QuantkitError) -> str:
    return " — ".join(filter(None, (error.what, error.why)))
