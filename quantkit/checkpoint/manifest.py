"""``quantkit.json``: what a checkpoint is made of and what it was made from.

The same run twice gives the same bytes: no time, no host, no path of this machine is in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from quantkit.checkpoint.coverage import Coverage, SourceFile
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, EXPERT
from quantkit.sources.base import SourceIdentity
from quantkit.support.errors import CheckpointError
from quantkit.support.frozen import Frozen
from quantkit.support.strict_json import parse_object

MANIFEST = "quantkit.json"
SCHEMA_VERSION = 1
FEW_TOKENS = 128
"""Of fewer an expert's Hessian says little."""
MAX_BYTES = 64 * 2**20
BLOCK, BLOCK_DIGITS = 2**20, 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_SHA256 = r"^[0-9a-f]{64}$"


def is_plain_name(name: str) -> bool:
    """Whether ``name`` can only mean a file directly inside a folder, on every system."""
    return _PLAIN_NAME.fullmatch(name) is not None and ".." not in name


class SourceRecord(Frozen):
    """Which model was quantized. A local path is kept as its last part only."""

    kind: str
    uri: str
    revision: str | None = None
    files: dict[str, str] = Field(default_factory=dict)
    pinned: bool = False

    @classmethod
    def of(cls, identity: SourceIdentity) -> SourceRecord:
        """The record of a source's identity, without this machine's folders."""
        uri = identity.uri
        if identity.kind not in ("hub", "package", "synthetic") and "://" not in uri:
            uri = Path(uri).expanduser().resolve().name
        return cls(kind=identity.kind, uri=uri, revision=identity.revision,
                   files=dict(identity.files), pinned=identity.pinned)


class ExportRecord(Frozen):
    """The checkpoint that this one was packed from, its levels and scales unchanged.

    Attributes:
        uri: its folder's name, or its name on the hub.
        quant_method: who could read it.
        formats: the formats of its layers.
        manifest_sha256: the hash of its ``quantkit.json``; ``None`` for another tool's, whose files' hashes
            are the source's.
    """

    uri: str
    quant_method: str
    formats: tuple[str, ...] = Field(strict=False)
    manifest_sha256: str | None = Field(default=None, pattern=_SHA256)


class CalibrationFacts(Frozen):
    """What calibrated methods saw.

    Attributes:
        text: ``builtin``, base names of files, names of data sets; with commas, if there are several.
        windows, window, seed, importance: as in the recipe.
        packing: how documents became windows: ``stream`` or ``documents``.
        tokens: the number of tokens that went through the model.
        sha256: the hash of the token ids as little-endian int64 ``[windows, tokens]``.
        files: the files that were read, as they were.
        coverage: the report on the text.
    """

    text: str
    windows: int
    window: int
    seed: int
    tokens: int
    sha256: str = Field(pattern=_SHA256)
    importance: str = "equal"
    packing: str = "stream"
    files: tuple[SourceFile, ...] = Field(default=(), strict=False)
    coverage: Coverage | None = None


class LayerRow(Frozen):
    """What became of one Linear; a kept layer has no method, format, spec or error.

    Attributes:
        name: full name, without ``.weight``.
        shape: the weight's, ``(out, in)``.
        dtype: logical dtype of the weight, ``bfloat16``.
        bits: stored bits a weight, scales and zero points included.
        bytes: the size of all tensors that are stored for it.
        error: ``‖W − Ŵ‖ / ‖W‖`` (Frobenius), of the weight as it is stored.
        tokens: calibration tokens that reached it; ``None`` where its method needs none.
        notes: every fallback taken, a sentence each.
    """

    name: str = Field(min_length=1)
    shape: tuple[int, int] = Field(strict=False)
    dtype: str
    method: str | None = None
    format: str | None = None
    spec: QuantSpec | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    bits: float = Field(allow_inf_nan=False)
    bytes: int = Field(ge=0)
    error: float | None = Field(default=None, allow_inf_nan=False)
    tokens: int | None = Field(default=None, ge=0)
    notes: tuple[str, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _whole(self) -> LayerRow:
        keys = [key for key in ("method", "format", "spec") if getattr(self, key) is not None]
        if keys and len(keys) < 3:
            raise ValueError(f"a layer with {' and '.join(keys)} alone is neither quantized nor kept")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return self.model_dump(mode="json")


def bits_per_weight(rows: Sequence[LayerRow]) -> float:
    """Stored bits of these Linears over their parameters; the embedding isn't counted, quantized or not."""
    rows = [row for row in rows if row.name != EMBEDDING]
    weights = sum(row.shape[0] * row.shape[1] for row in rows)
    return 8 * sum(row.bytes for row in rows) / weights if weights else 0.0


def reached_experts(rows: Sequence[LayerRow]) -> str | None:
    """How many calibration tokens the experts got; ``None`` if there are none that are calibrated."""
    sizes: dict[str, int] = {}
    for row in rows:
        before, inside, after = row.name.partition(EXPERT)
        if inside and row.tokens is not None:
            name = f"{before}.{after.partition('.')[0]}"
            sizes[name] = min(row.tokens, sizes.get(name, row.tokens))
    if not sizes:
        return None
    counts = sorted(sizes.values())
    few = sum(count < FEW_TOKENS for count in counts)
    return (f"{counts[0]:,} to {counts[-1]:,} tokens each (median {median_low(counts):,})"
            + (f"; {few:,} of {len(counts):,} got fewer than {FEW_TOKENS}" if few else ""))


class RecoveryRecord(Frozen):
    """What training of scales and norms came to.

    Attributes:
        name, options: of the recovery, defaults filled in.
        windows: windows of text, with those that are held out.
        held_out: windows that weren't trained on.
        sha256: the hash of the token ids as little-endian int64 ``[windows, length]``.
        before, after: the divergence from the original model on held-out windows, with values as they are
            stored; ``after`` is ``None`` if the training diverged.
        kept: whether the trained values are in the checkpoint; otherwise it is as it was before.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    windows: int = Field(ge=2)
    held_out: int = Field(ge=1)
    sha256: str = Field(pattern=_SHA256)
    before: float = Field(allow_inf_nan=False)
    after: float | None = Field(default=None, allow_inf_nan=False)
    kept: bool

    @property
    def note(self) -> str | None:
        """Why scales and norms stayed as they were, if they did."""
        if self.kept:
            return None
        after = "it diverged" if self.after is None else f"{self.before:.4g} → {self.after:.4g}"
        return (f"training by {self.name} did not lower the loss on {self.held_out} held-out windows "
                f"({after}): scales and norms stay as they were")


class FileRecord(Frozen):
    """One file of the checkpoint.

    Attributes:
        sha256: the hash of the whole file.
        blocks: for each block of :data:`BLOCK` bytes (the last may be shorter) the first :data:`BLOCK_DIGITS`
            digits of its sha256, one after another; empty if blocks weren't hashed. Enough to find damage by
            chance; against malice there is ``sha256``.
    """

    sha256: str = Field(pattern=_SHA256)
    bytes: int = Field(ge=0)
    blocks: str = Field(default="", pattern=r"^[0-9a-f]*$")

    @model_validator(mode="after")
    def _all_blocks(self) -> FileRecord:
        if self.blocks and len(self.blocks) != -(-self.bytes // BLOCK) * BLOCK_DIGITS:
            raise ValueError("blocks is not a hash of each block")
        return self

    @property
    def block_count(self) -> int:
        """How many blocks were hashed."""
        return len(self.blocks) // BLOCK_DIGITS


class Manifest(Frozen):
    """The whole of ``quantkit.json``.

    Attributes:
        schema_version: the version of this file's layout.
        recipe: the result of ``Recipe.snapshot()``.
        source: the model that was quantized.
        calibration: ``None`` if no method needed any.
        layers: a row for every Linear, in the model's order; filled in by the writer.
        recovery: the result of training scales and norms; only there if the recipe asks for it.
        exported: the checkpoint that it was packed from; only there if it was.
        plugins: distribution → version of each that registered a method or format in use.
        files: every other file of the folder by plain name; filled in by the writer.
        digest: sha256 of this JSON with ``digest`` empty, so that damage to it shows too.
    """

    schema_version: Literal[1] = 1
    quantkit_version: str
    recipe: dict[str, Any]
    source: SourceRecord
    calibration: CalibrationFacts | None = None
    recovery: RecoveryRecord | None = None
    exported: ExportRecord | None = None
    layers: tuple[LayerRow, ...] = Field(default=(), strict=False)
    plugins: dict[str, str] = Field(default_factory=dict)
    files: dict[str, FileRecord] = Field(default_factory=dict)
    digest: str = ""

    @field_validator("files")
    @classmethod
    def _plain(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in files:
            if not is_plain_name(name):
                raise ValueError(f"{name!r} is not a plain file name")
        return files

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all Linears over their parameters."""
        return bits_per_weight(self.layers)

    def fallbacks(self) -> list[str]:
        """What was done in place of what was asked for: of the calibration text, then layer by layer."""
        coverage = self.calibration.coverage if self.calibration else None
        text = [f"calibration: {coverage.fallback}"] if coverage and coverage.fallback else []
        recovery = [f"recover: {self.recovery.note}"] if self.recovery and self.recovery.note else []
        return text + recovery + [f"{row.name}: {note}" for row in self.layers for note in row.notes]

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, an indent of one, a final newline, the digest set, no key that isn't
        used."""
        plain = self.model_dump(mode="json") | {"digest": ""}
        if self.exported is None:
            del plain["exported"]
        if self.recovery is None:
            del plain["recovery"]
        coverage = (plain["calibration"] or {}).get("coverage")
        if coverage and not coverage["unusable"]:
            del coverage["unusable"], coverage["unusable_first"]
        for record in plain["files"].values():
            if not record["blocks"]:
                del record["blocks"]
        return _canonical(plain | {"digest": hashlib.sha256(_canonical(plain)).hexdigest()})

    @classmethod
    def from_bytes(cls, raw: bytes, label: str = MANIFEST) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: not JSON, of another schema, or changed since it was written.
        """
        again = "quantize again, or copy the checkpoint again from where it came"
        if len(raw) > MAX_BYTES:
            raise CheckpointError(f"{label} is larger than {MAX_BYTES // 2**20} MiB", next=again)
        plain = parse_object(raw, label, error=CheckpointError, next=again)
        if "schema_version" not in plain:
            raise CheckpointError(f"{label} is damaged", why="it has no schema_version", next=again)
        version, written = plain["schema_version"], _canonical(plain)
        if version != SCHEMA_VERSION:
            raise CheckpointError(f"{label} has schema version {version!r}",
                                  why=f"this quantkit reads {SCHEMA_VERSION}; another version wrote it",
                                  next="run pip install . in a newer checkout of quantkit")
        # comparing bytes also catches a duplicate key and damage between the values; what a later version
        # added is not in it, so it is the JSON itself that is compared
        digest = hashlib.sha256(_canonical(plain | {"digest": ""})).hexdigest()
        intact = written == raw and plain.get("digest") == digest
        try:
            manifest = cls.model_validate_json(raw)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            why = f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            if intact and fault["type"] in ("missing", "extra_forbidden"):
                raise CheckpointError(f"{label} was written by another version of quantkit", why=why,
                                      next="quantize the model again with this version") from None
            raise CheckpointError(f"{label} is damaged", why=why, next=again) from None
        if not intact:
            raise CheckpointError(f"{label} is damaged or was edited",
                                  why="it is not what its own digest says", next=again)
        return manifest


def _canonical(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def quantization_label(rows: Sequence[LayerRow]) -> str:
    """``gptq int4 g64 sym``, ``nf4 b64``; several kinds are joined by commas."""
    kinds = dict.fromkeys(f"{row.method} {row.spec.label().removeprefix(f'{row.method} ')}"
                          for row in rows if row.method and row.spec)
    return ", ".join(kinds) or "unquantized"
