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

from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, EXPERT
from quantkit.sources.base import SourceIdentity
from quantkit.sources.causal_lm import SPELLINGS
from quantkit.support.errors import CheckpointError
from quantkit.support.frozen import Frozen
from quantkit.support.strict_json import parse_object

MANIFEST = "quantkit.json"
SCHEMA_VERSION = 1
FEW_TOKENS = 128
"""Of fewer an expert's Hessian says little."""
MAX_BYTES = 64 * 2**20
BLOCK, BLOCK_DIGITS = 2**20, 16
FEWEST_DISTINCT = 0.01
"""Of the vocabulary: a text with fewer different tokens says little about the rest."""
SHARED = 0.2
"""Of a window's 13-grams: from here on it counts as taken from the other text, as in Llama 2,
https://arxiv.org/abs/2307.09288, appendix A.6."""
LAYERS = "model.layers."
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


class SourceFile(Frozen):
    """A file that calibration text was read from, by a name without this machine's folders."""

    name: str
    sha256: str = Field(pattern=_SHA256)
    revision: str | None = None


class Overlap(Frozen):
    """What the windows share with a text that models are evaluated on.

    Attributes:
        text: the name of the text.
        windows: the number of windows that share at least a fifth of their 13-grams with it.
        largest: the largest share of one window.
    """

    text: str
    windows: int = Field(ge=0)
    largest: float = Field(ge=0, le=1)


class Coverage(Frozen):
    """How well a calibration text covers a model: what it gets to see.

    Attributes:
        documents: documents that the tokens were chosen from.
        chats: documents that are conversations.
        available: tokens that there were.
        used: tokens in the windows.
        distinct: different tokens among those.
        vocabulary: tokens that the model knows.
        widest: inputs of the widest calibrated Linear.
        short: documents of fewer tokens than a window.
        cut: documents whose end had no room in their window.
        lost: tokens of those ends.
        left_out: conversations in which someone writes a special token of the model.
        unusable: rows that are broken, of no known form, or refused by the chat template.
        unusable_first: the fault of the first of these rows.
        avoided: windows or documents left out for what they share with texts to avoid.
        same: windows equal to an earlier one.
        similar: other windows that repeat earlier ones by half.
        overlaps: with texts that models are evaluated on.
        fallback: the text that was asked for and can't be used, and why.
    """

    documents: int
    chats: int = 0
    available: int
    used: int = 0
    distinct: int = 0
    vocabulary: int
    widest: int
    short: int = 0
    cut: int = 0
    lost: int = 0
    left_out: int = 0
    unusable: int = 0
    unusable_first: str | None = None
    avoided: int = 0
    same: int = 0
    similar: int = 0
    overlaps: tuple[Overlap, ...] = Field(default=(), strict=False)
    fallback: str | None = None

    def lines(self) -> list[str]:
        """The report, a sentence each."""
        share = self.distinct / self.vocabulary
        facts = [f"{self.used:,} of {self.available:,} tokens, from {self.documents:,} "
                 + ("documents" if self.documents != 1 else "document")
                 + (f" ({self.chats:,} conversations)" if self.chats else ""),
                 f"{self.distinct:,} different tokens, {share:.1%} of the vocabulary",
                 f"{self.same:,} windows equal an earlier one, {self.similar:,} repeat earlier ones by half"]
        if self.cut:
            facts.append(f"{self.cut:,} documents cut at a window's end, {self.lost:,} tokens of them lost")
        if self.short:
            facts.append(f"{self.short:,} documents shorter than a window")
        if self.left_out:
            facts.append(f"{self.left_out:,} conversations left out: a special token is written in them")
        if self.unusable:
            facts.append(f"{self.unusable:,} rows left out: they can't be used")
        if self.avoided:
            facts.append(f"{self.avoided:,} left out for what they share with texts to avoid")
        facts += [f"up to {overlap.largest:.1%} of a window's 13-grams are in {overlap.text}"
                  for overlap in self.overlaps]
        return facts

    def warnings(self, length: int) -> list[str]:
        """What is bad about it, a sentence each; ``length`` is that of a window."""
        warnings = self.row_warnings()
        if self.used < self.widest:
            warnings.append(f"{self.used:,} calibration tokens are fewer than the {self.widest:,} inputs of "
                            "the widest layer: its Hessian has no full rank, and damping decides the rest; "
                            f"--windows {-(-self.widest // length)} would do")
        if self.distinct < FEWEST_DISTINCT * self.vocabulary:
            warnings.append(f"the calibration text has {self.distinct:,} different tokens, "
                            f"{self.distinct / self.vocabulary:.2%} of the vocabulary: more text covers more")
        if self.same or self.similar:
            warnings.append(f"of the calibration windows {self.same} are equal to an earlier one and "
                            f"{self.similar} repeat earlier ones by half: such text counts twice")
        if self.lost > self.used:
            warnings.append(f"{self.lost:,} tokens were cut off at windows' ends, more than the "
                            f"{self.used:,} that are used: a larger --window keeps more of each document")
        return warnings + self.overlap_warnings("calibration")

    def row_warnings(self) -> list[str]:
        """That rows can't be used, a sentence."""
        rows = "1 row is" if self.unusable == 1 else f"{self.unusable:,} rows are"
        return [f"{rows} left out of the calibration data, where --strict would stop; the first: "
                f"{self.unusable_first}"] if self.unusable else []

    def overlap_warnings(self, kind: str) -> list[str]:
        """What windows of this kind share with texts that models are evaluated on, a sentence each."""
        return [f"{overlap.windows} {kind} windows share up to {overlap.largest:.0%} of their 13-grams with "
                f"{overlap.text}: measured on that, the result looks better than it is"
                for overlap in self.overlaps if overlap.windows]


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


class OuterRecord(Frozen):
    """The model of images and text that a text model was quantized in: its files have all of it.

    Attributes:
        model_type: of its ``config.json``.
        prefixes: what begins names of tensors in the files, by what begins them in the text model.
    """

    model_type: str
    prefixes: dict[str, str]

    @field_validator("prefixes")
    @classmethod
    def _known(cls, prefixes: dict[str, str]) -> dict[str, str]:
        if prefixes not in SPELLINGS:
            raise ValueError("no model's tensors are called so")
        return prefixes

    def file_name(self, name: str) -> str:
        """What a tensor or layer of the text model is called in the files."""
        start = next((start for start in self.prefixes if name.startswith(start)), None)
        return name if start is None else self.prefixes[start] + name.removeprefix(start)

    def text_name(self, name: str) -> str | None:
        """What a tensor of the files is called in the text model; ``None``: it isn't in that."""
        return next((start + name.removeprefix(prefix) for start, prefix in self.prefixes.items()
                     if name.startswith(prefix)), None)


class OutlineRecord(Frozen):
    """Of a model whose mathematics quantkit doesn't know: other engines run it.

    Attributes:
        model_type: of its ``config.json``.
        layer_prefix: the beginning of its decoder layers' names.
        kept: parameters of the matrices that stayed as they were, by why.
        quantized: parameters of those that are quantized.
        engines: some that read it, if they run this family.
        calibrated: the library whose modules calibration text was pushed through, and its version, if any.
    """

    model_type: str
    layer_prefix: str
    kept: dict[str, int] = Field(default_factory=dict)
    quantized: int = Field(ge=0)
    calibrated: str | None = None
    engines: tuple[str, ...] = Field(default=("vllm", "transformers"), strict=False)

    @property
    def readers(self) -> str:
        """The engines, for a sentence."""
        return " and ".join(self.engines)


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
        outline: only there if other engines run the model, and quantkit doesn't.
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
    outline: OutlineRecord | None = None
    outer: OuterRecord | None = None
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
    def stored_layers(self) -> tuple[LayerRow, ...]:
        """The layers by the names that they have in the files."""
        if (outer := self.outer) is None:
            return self.layers
        return tuple(row.model_copy(update={"name": outer.file_name(row.name)}) for row in self.layers)

    @property
    def layer_prefix(self) -> str | None:
        """The beginning of the layers' names in the files, where there may be other modules of such names."""
        if self.outer is not None:
            return self.outer.file_name(LAYERS)
        return None if self.outline is None else self.outline.layer_prefix

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
        for name in ("exported", "recovery", "outline"):
            if getattr(self, name) is None:
                del plain[name]
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
