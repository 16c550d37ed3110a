"""Converts a finished checkpoint to another layout: with the same codes and scales, or not at all.

Nothing is rounded here. What another layout can't hold exactly would be another model than the one that was
measured; it is made from the original by a recipe that names the layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import operator
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.checkpoint.durable import hash_file
from quantkit.checkpoint.engines import reason_against
from quantkit.checkpoint.manifest import ExportRecord, LayerRow, Manifest, SourceRecord
from quantkit.checkpoint.open import AnyCheckpoint, open_quantized
from quantkit.checkpoint.quantization_config import OWN, quantization_config, stored_quantization
from quantkit.checkpoint.reader import CARD, Checkpoint, read_manifest
from quantkit.checkpoint.writer import CheckpointWriter, refuse_existing
from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.dtypes import FLOATS
from quantkit.formats.level_values import middle
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, HEAD, all_slots, layer_of, parse_config
from quantkit.models.loadable import check_loadable
from quantkit.ops import packing
from quantkit.plugins.manager import current, registry
from quantkit.support.errors import CheckpointError, QuantkitError, SpecError, Stopped, UsageError
from quantkit.support.paths import local_path
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit.support.units import human_bytes

REST = "rest"
SHOWN = 5
Widening = Callable[[QuantSpec], QuantSpec]
WIDENED: tuple[Widening, ...] = (lambda spec: spec, operator.attrgetter("in_bytes"),
                                 operator.attrgetter("centered"))
"""How the same levels are kept, the smallest first."""


@dataclass(frozen=True)
class ExportResult:
    """What an export made.

    Attributes:
        out: the checkpoint's folder.
        format: the layout of its quantized layers.
        rows: a row a Linear.
        decoded: the layers that are quantized in the original and plain here.
        seconds: the time that this attempt took.
    """

    out: Path
    format: str
    rows: tuple[LayerRow, ...]
    decoded: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"out": str(self.out), "format": self.format, "seconds": self.seconds,
                "decoded": list(self.decoded), "tensor_bytes": sum(row.bytes for row in self.rows),
                "layers": [row.to_dict() for row in self.rows]}


def export(uri: str, to: str, out: str | Path, *, engine: str | None = None, revision: str | None = None,
           progress: Listener = silent) -> ExportResult:
    """Pack a checkpoint anew in another layout.

    Integers of 5 to 7 bits are stored in 8 symmetric ones where the layout or ``engine`` has none of theirs,
    and integers with zero points as symmetric ones of a bit more where it has none of these.
    An embedding or a head that the layout has no place for, or that ``engine`` reads only plain, is decoded
    to the model's dtype.

    Args:
        uri: a checkpoint, of quantkit or another tool, here or on the hub.
        to: a registered format.
        out: the folder to make; nothing may be there.
        engine: ``vllm``, ``sglang``, ``transformers`` or ``mlx``: what must load the result on a GPU.
        revision: commit or tag, of a checkpoint on the hub.
        progress: called before each unit and once at the end.

    Raises:
        UsageError: it isn't quantized, or there is no such format.
        SpecError: the layout can't hold a layer's spec or shape.
        CheckpointError: the layout can't hold a layer exactly: nothing is left. Or a file is damaged, or the
            checkpoint couldn't be loaded.
        Stopped: interrupted; the finished layers are kept.
    """
    start = time.monotonic()
    refuse_existing(out, uri)
    form: Format = registry("formats").get(to)
    opened = open_quantized(uri, revision)
    try:
        check_loadable(uri, opened.config(), opened.infos, opened.side_files(), opened.layers,
                       error=CheckpointError)
        rows = _rows(opened, form, to, engine)
        manifest = _manifest(opened, to, checkpoint_name(uri))
        needed = 2 * sum(info.nbytes for info in opened.infos.values())
        identity = manifest.model_dump(mode="json") | {"format": to}
        with CheckpointWriter(out, identity, needed_bytes=needed) as writer:
            done = _write(writer, opened, form, rows, manifest, progress)
        before = {row.name for row in opened.layers if row.spec is not None}
        decoded = tuple(row.name for row in rows if row.spec is None and row.name in before)
        return ExportResult(done, to, read_manifest(done).layers, decoded, time.monotonic() - start)
    finally:
        opened.close()


def _rows(checkpoint: AnyCheckpoint, form: Format, to: str, engine: str | None) -> list[LayerRow]:
    """What every layer becomes. Raises SpecError for all that the layout or the engine refuses of the bits
    that the layers have."""
    quantized = {row.name for row in checkpoint.layers if row.spec is not None}
    refusal = unloadable = None
    ends = [plain for plain in ((), (EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)) if quantized.issuperset(plain)]
    specs = [row.spec for row in checkpoint.layers if row.spec is not None]
    widenings = [widen for widen in WIDENED if widen is WIDENED[0] or any(widen(s) != s for s in specs)]
    for widen, plain in itertools.product(widenings, ends):
        try:
            rows = _layout_rows(checkpoint, form, to, plain, widen)
        except SpecError as error:
            refusal = refusal or error
            continue
        if engine is None or (reason := reason_against(engine, checkpoint.config(), rows)) is None:
            return rows
        unloadable = unloadable or SpecError(
            f"{engine} wouldn't load {checkpoint.path} in format {to}", why=reason,
            next=f"choose another --to, or quantize the original by a recipe with --for {engine}")
    raise unloadable or refusal or AssertionError("nothing was tried")


def _layout_rows(checkpoint: AnyCheckpoint, form: Format, to: str, plain: Collection[str],
                 widen: Widening) -> list[LayerRow]:
    """The rows with the layers ``plain`` decoded and the specs of others widened. Raises SpecError for all
    that the layout refuses."""
    rows, refused = [], []
    for row in checkpoint.layers:
        if row.spec is None:
            rows.append(row)
            continue
        if row.name in plain:
            size = _bytes(FLOATS[row.dtype], row.shape)
            rows.append(row.model_copy(update={"method": None, "format": None, "spec": None, "options": {},
                                               "bytes": size, "bits": 8 * size / math.prod(row.shape)}))
            continue
        spec = _spec(widen(row.spec), form, row)
        try:
            if (reason := form.reason_against(spec, row.shape)) is not None:
                raise SpecError(reason)
            if row.name == EMBEDDING and not hasattr(form, "rows"):
                raise SpecError(f"format {to} can't give single rows of an embedding")
            layout = packing.layout(form, spec, row.shape, FLOATS[row.dtype])
        except QuantkitError as error:
            refused.append(f"{row.name}: {error.why or error.what}")
            continue
        size = sum(_bytes(dtype, shape) for dtype, shape in layout.values())
        rows.append(row.model_copy(update={"format": to, "spec": spec, "bytes": size,
                                           "bits": 8 * size / math.prod(row.shape)}))
    check_layers(checkpoint, f"format {to}", refused,
                 "choose another --to, or quantize the original by a recipe with that format")
    if form.quant_method != OWN["quant_method"] and quantization_config(rows) == OWN:
        kinds = dict.fromkeys(row.spec.label() for row in rows if row.spec)
        if turned := [row.name for row in rows if row.spec and row.spec.rotation]:
            raise SpecError(f"format {to} has no words for inputs that are rotated",
                            why=f"{turned[0]} has a rotation, and {len(turned) - 1} more",
                            next="quantize the original by a recipe without rotation:")
        raise SpecError(f"no quantization_config can say this mix in format {to}", why=", ".join(kinds),
                        next="--to pack-quantized can say a mix of integers")
    return rows


def check_layers(checkpoint: AnyCheckpoint, layout: str, refused: Sequence[str], remedy: str) -> None:
    """Raise SpecError for what a layout refuses, a reason a layer, or UsageError if nothing is quantized."""
    if refused:
        more = [f"and {len(refused) - SHOWN} more"] if len(refused) > SHOWN else []
        raise SpecError(f"{layout} can't hold {checkpoint.path}", next=remedy,
                        why="\n".join([*refused[:SHOWN], *more]))
    if not any(row.spec for row in checkpoint.layers):
        raise UsageError(f"no layer of {checkpoint.path} is quantized", next="quantkit inspect DIR")


def check_absent(path: Path) -> None:
    """Raise CheckpointError if something is where an export is to be written."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} already exists", why="nothing is ever written over",
                              next="choose another --out")


@contextlib.contextmanager
def room_for(path: Path, folder: Path, size: int, subject: str = "it") -> Iterator[None]:
    """Write ``size`` bytes at ``path``, on the disk of ``folder``, which is made if it is missing. Raises
    CheckpointError: they don't fit, or can't be written."""
    remedy = "free some space, or choose another --out"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if size > (free := shutil.disk_usage(folder).free):
            raise CheckpointError(f"{path} doesn't fit on its disk", next=remedy,
                                  why=f"{human_bytes(size)} are needed, {human_bytes(free)} are free")
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be written", next=remedy,
                              why=f"{error.strerror or error}; {subject} takes {human_bytes(size)}, and "
                                  "nothing is left of it") from error


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes


def _spec(spec: QuantSpec, form: Format, row: LayerRow) -> QuantSpec:
    """The same weight as ``form`` describes it: its scales' dtype, and what its levels are counted from."""
    follows = spec.scale_dtype in FLOATS and spec.kind in ("int", "fp")
    dtype = getattr(form, "scales", None) or (row.dtype if follows else spec.scale_dtype)
    moved = spec.model_copy(update={"scale_dtype": dtype})
    if spec.kind != "int":
        return moved
    changes = [{"symmetric": False, "minimum": False}, {"symmetric": False, "minimum": True},
               {"symmetric": True, "minimum": False}]
    for candidate in (moved, *(moved.model_copy(update=change) for change in changes)):
        if form.reason_against(candidate, row.shape) is None:
            return candidate
    return moved


def checkpoint_name(uri: str) -> str:
    """A folder by its last part, a name on the hub as it is."""
    path = local_path(uri)
    return path.resolve().name if path is not None and path.is_dir() else uri


def _manifest(checkpoint: AnyCheckpoint, to: str, name: str) -> Manifest:
    """Who made the levels stays; where they lay is added."""
    method = str((stored_quantization(checkpoint.config()) or {}).get("quant_method"))
    formats = tuple(dict.fromkeys(row.format for row in checkpoint.layers if row.format))
    owner = registry("formats").entry(to).owner
    plugins = {p.distribution: p.version for p in current().plugins if p.distribution == owner}
    if isinstance(checkpoint, Checkpoint):
        check_intact(checkpoint)
        known = checkpoint.manifest
        record = ExportRecord(uri=name, quant_method=method, formats=formats,
                              manifest_sha256=hashlib.sha256(known.to_bytes()).hexdigest())
        return known.model_copy(update={
            "quantkit_version": __version__, "layers": (), "files": {}, "digest": "",
            "plugins": {**known.plugins, **plugins}, "exported": record, "outer": None})
    source = SourceRecord.of(checkpoint.identity())
    recipe: dict[str, Any] = {"name": "export", "calibration": None, "rules": [], "kv": None,
                              "description": f"Another tool's checkpoint ({method}), packed anew."}
    return Manifest(quantkit_version=__version__, recipe=recipe, source=source, plugins=plugins,
                    exported=ExportRecord(uri=source.uri, quant_method=method, formats=formats))


def check_intact(checkpoint: Checkpoint) -> None:
    """Damage must not be given a new hash. Raises CheckpointError."""
    for name, record in checkpoint.manifest.files.items():
        if name != CARD and hash_file(checkpoint.path / name)[0] != record.sha256:
            raise CheckpointError(f"{checkpoint.path / name} is damaged",
                                  why="its hash is not the manifest's",
                                  next="copy the checkpoint again from where it came, or quantize again")


def _write(writer: CheckpointWriter, checkpoint: AnyCheckpoint, form: Format, rows: Sequence[LayerRow],
           manifest: Manifest, progress: Listener) -> Path:
    config = checkpoint.config()
    shape = parse_config(config)
    where = {slot.name: slot.layer for slot in all_slots(shape)}
    units: dict[int | None, list[LayerRow]] = {index: [] for index in (*range(shape.num_layers), None)}
    for row in rows:
        units[where[row.name]].append(row)
    before = {row.name: row for row in checkpoint.layers}
    tensors_of_layers = {f"{row.name}.{suffix}" for row in rows for suffix in _suffixes(before[row.name])}
    other = [name for name in checkpoint.infos if name not in tensors_of_layers]
    try:
        for index, members in units.items():
            unit = REST if index is None else f"layer-{index}"
            progress(ProgressEvent(len(units) - 1 if index is None else index, len(units),
                                   unit.replace("-", " ")))
            if writer.finished or writer.has(unit):
                continue
            mine = [n for n in other if layer_of(n, shape.num_layers) == index]
            writer.put(unit, _tensors(checkpoint, form, members) | {n: checkpoint.tensor(n) for n in mine},
                       [row.to_dict() for row in members])
            checkpoint.release()
        progress(ProgressEvent(len(units), len(units), "assembling and rereading"))
        return writer.finish(config, checkpoint.side_files(), manifest)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {len(writer.units())} of {len(units)} units are kept in {writer.partial}",
                      next="run the same command again to go on") from None
    except InexactError:
        writer.abandon()
        raise


def _suffixes(row: LayerRow) -> Sequence[str]:
    """The suffixes of the stored tensors that form a layer's weight."""
    if row.format is None or row.spec is None:
        return ("weight",)
    return tuple(packing.layout(registry("formats").get(row.format), row.spec, row.shape, FLOATS[row.dtype]))


def _tensors(checkpoint: AnyCheckpoint, form: Format, rows: Sequence[LayerRow]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for row in rows:
        packed = checkpoint.quantized(row.name)
        if packed is not None and row.spec is None:
            decoded = packing.dequantize(registry("formats").get(packed.format), packed)
            tensors[f"{row.name}.weight"] = decoded.to(FLOATS[row.dtype])
            continue
        if packed is None or row.spec is None:
            tensors[f"{row.name}.weight"] = checkpoint.tensor(f"{row.name}.weight")
            continue
        again = repack(row.name, packed, form, row.spec)
        tensors |= {f"{row.name}.{suffix}": tensor for suffix, tensor in again.tensors.items()}
    return tensors


class InexactError(CheckpointError):
    """A layout can't hold a layer's values as they are."""


def repack(name: str, packed: QuantizedTensor, form: Format, spec: QuantSpec) -> QuantizedTensor:
    """The same weight by another format; its levels less their zero points and its scales are compared.

    Args:
        name: the layer's name, for errors.
        packed: the weight as it is stored now.
        form: the format to pack it by.
        spec: how that format keeps it: its scales' dtype, and whether it has zero points.

    Raises:
        InexactError: the format can't hold a scale or a zero point as it is.
    """
    codes: Codes = registry("formats").get(packed.format).unpack(packed)
    if spec.bits != codes.spec.bits:
        wider = codes.spec.model_copy(update={"bits": spec.bits, "symmetric": True})
        levels = (signed_levels(codes) + middle(wider)).to(codes.codes.dtype)
        codes = replace(codes, spec=wider, codes=levels, zero=None)
    zero, minimum = _offsets(codes, spec)
    if spec.minimum and minimum is None:
        raise InexactError(f"layer {name} has zero points, for which format {form.name} has no place",
                           why=f"it stores minima, and {spec.scale_dtype} doesn't hold each zero point times "
                               "its scale exactly", next="quantize the original with symmetric: false, "
                                                         f"minimum: true and format: {form.name}")
    if codes.minimum is not None and minimum is None and zero is None:
        raise InexactError(f"layer {name} has minima, for which format {form.name} has no place",
                           why="they aren't whole numbers of steps below zero",
                           next=f"quantize the original with minimum: false and format: {form.name}")
    if spec.symmetric and zero is not None:
        if bool((zero != middle(spec)).any()):
            raise InexactError(f"layer {name} has zero points, for which format {form.name} has no place",
                               why=f"{int((zero != middle(spec)).sum())} of {zero.numel()} are not central",
                               next=f"quantize the original with symmetric: true and format: {form.name}")
        zero = None
    if spec.scale_dtype in FLOATS:
        for kind, values in (("scales", codes.scale), ("minima", minimum)):
            if values is not None:
                _check_exact(name, values, kind, form, spec.scale_dtype)
    wanted = replace(codes, spec=spec, zero=zero, minimum=minimum)
    try:
        again = packing.pack(form, wanted, packed.dtype)
    except SpecError as error:
        raise InexactError(f"layer {name}: {error.what}", why=error.why, next=error.next) from error
    back = form.unpack(again)
    kept = minimum is None or (back.minimum is not None and torch.equal(back.minimum, minimum))
    if not (kept and torch.equal(back.scale, codes.scale)
            and torch.equal(signed_levels(back), signed_levels(wanted))):
        raise InexactError(f"layer {name} doesn't come back from format {form.name} as it was",
                            why="a scale has no exact place there",
                            next=f"quantize the original by a recipe with format: {form.name}")
    return again


def _offsets(codes: Codes, spec: QuantSpec) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Zero points and minima of the same integers as ``spec`` has them; ``None`` for what it hasn't, and for
    both where these weren't the same weights to the bit. Zero points that had to be found are there of
    symmetric weights too."""
    if codes.spec.kind != "int" or codes.spec.minimum == spec.minimum:
        zero = codes.zero
        if codes.spec.kind == "int" and not spec.symmetric and not spec.minimum and zero is None:
            zero = torch.full(codes.scale.shape, middle(spec), dtype=torch.uint8)
        return zero, codes.minimum
    scale = codes.scale.double()  # products with a level are exact
    if codes.minimum is None:
        levels = float(middle(spec)) if codes.zero is None else codes.zero.double()
        minimum = levels * -scale
        rounded = minimum.to(FLOATS[spec.scale_dtype])
        return None, rounded.float() if torch.equal(rounded.double(), minimum) else None
    steps = torch.where(scale == 0, middle(spec), -codes.minimum.double() / scale).round()
    exact = torch.equal(steps * scale, -codes.minimum.double()) and bool(
        ((steps >= 0) & (steps < 2**spec.bits)).all())
    return steps.to(torch.uint8) if exact else None, None


def _check_exact(name: str, values: torch.Tensor, kind: str, form: Format, dtype: str) -> None:
    """Raises InexactError if a dtype, in which a format keeps some values of a layer, lacks one of them."""
    lost = values[values.to(FLOATS[dtype]).float() != values]
    if lost.numel():
        raise InexactError(f"layer {name} has {kind} that {dtype} doesn't hold exactly",
                           why=f"{lost.numel()} of {values.numel()}, such as {lost[0].item():.9g}; format "
                               f"{form.name} keeps {kind} in {dtype}",
                           next=f"quantize the original by a recipe with format: {form.name}: {kind} are "
                                "then rounded before the levels are chosen")


def signed_levels(codes: Codes) -> torch.Tensor:
    """Levels less their zero points, int16; of a codebook or above minima, the levels."""
    level = codes.codes.to(torch.int16)
    if codes.spec.kind != "int" or codes.minimum is not None:
        return level
    zero = torch.full(codes.scale.shape, middle(codes.spec)) if codes.zero is None else codes.zero
    grouped = level.reshape(codes.codes.shape[0], codes.scale.shape[1], -1)
    return (grouped - zero.to(torch.int16).expand(codes.codes.shape[0],
                                                  -1).unsqueeze(-1)).reshape(level.shape)

