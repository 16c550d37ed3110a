"""Reads a checkpoint: its manifest first, then sizes and structure, then tensors on demand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.manifest import MANIFEST, MAX_BYTES, LayerRow, Manifest, quantization_label
from quantkit.checkpoint.quantization_config import KEYS, stored_quantization
from quantkit.checkpoint.unfinished import is_unfinished, refuse_unfinished, unfinished
from quantkit.formats.base import Format, QuantizedTensor
from quantkit.formats.dtypes import FLOATS
from quantkit.ops import packing
from quantkit.plugins.manager import BUILTIN, registry
from quantkit.sources.base import MappedFile, TensorInfo
from quantkit.sources.causal_lm import text_config
from quantkit.sources.local import has_leftover_words
from quantkit.sources.safetensors_file import ShardedTensors
from quantkit.support.errors import CheckpointError, QuantkitError, SourceError, SpecError
from quantkit.support.html import html_table
from quantkit.support.paths import open_regular, reading
from quantkit.support.strict_json import MAX_CONFIG, read_object
from quantkit.support.units import human_bytes

CONFIG = "config.json"
CARD = "README.md"
INDEX = "model.safetensors.index.json"
GPTQ_CONFIG = "quantize_config.json"
"""``quantization_config`` once more, where readers of GPTQ checkpoints have always looked for it."""
AGAIN = "copy the checkpoint again from where it came, or quantize again"


def is_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` is a folder that :meth:`Checkpoint.open` should be asked about: one with
    ``quantkit.json``, an unfinished one, or one whose ``config.json`` says how it is quantized."""
    folder = Path(path)
    return folder.is_dir() and ((folder / MANIFEST).is_file() or is_unfinished(folder)
                                or foreign_method(folder) is not None)


class Checkpoint:
    """A quantized model on disk. Use :meth:`open`; close it when done, or use it in a ``with``.

    Attributes:
        path: the place of the folder.
        manifest: the content of ``quantkit.json``.
    """

    def __init__(self, path: Path, manifest: Manifest, config: Mapping[str, Any] | None = None) -> None:
        """``config``: what ``config.json`` will be, while it isn't written."""
        self.path = path
        self.manifest = manifest
        self._config = config
        self._rows = {row.name: row for row in manifest.layers}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a checkpoint: the manifest is whole, every file is there with its size, and every
        layer has the tensors that its format says. Hashes are left to
        :mod:`quantkit.checkpoint.integrity` and ``quantkit verify``.

        Raises:
            CheckpointError: it is unfinished, damaged, or another tool's, or it has layers of a format that
                isn't installed.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        for name, record in manifest.files.items():
            if name == CARD:
                continue  # people edit it; only verify minds
            file = folder / name
            if not file.is_file():
                raise CheckpointError(f"{folder} has no {name}", why=f"{MANIFEST} lists it", next=AGAIN)
            if (size := file.stat().st_size) != record.bytes:
                raise CheckpointError(f"{file} is damaged", next=AGAIN,
                                      why=f"it has {size:,} bytes, it was written with {record.bytes:,}")
        _check_formats(folder, manifest)
        checkpoint = cls(folder, manifest)
        try:
            checkpoint.check_structure()
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def __repr__(self) -> str:
        return (f"<quantkit.Checkpoint {self.path}: {quantization_label(self.layers)}, "
                f"{human_bytes(self.file_bytes)}>")

    def _repr_html_(self) -> str:
        """What a notebook shows: what became of each Linear, those of a kind together, and each by itself in
        what can be opened."""
        def cells(rows: Sequence[LayerRow]) -> tuple[str, ...]:
            errors = [row.error for row in rows if row.error is not None]
            return (rows[0].method or "kept", rows[0].spec.label() if rows[0].spec else rows[0].dtype,
                    f"{rows[0].bits:.2f}", human_bytes(sum(row.bytes for row in rows)),
                    f"{max(errors):.4f}" if errors else "",
                    "\n".join(dict.fromkeys(note for row in rows for note in row.notes)))

        groups: dict[tuple[str, ...], list[LayerRow]] = {}
        for row in self.layers:
            kind = re.sub(r"\.\d+\.", ".*.", row.name)
            groups.setdefault((kind, *cells([row])[:2]), []).append(row)
        heads = ("method", "spec", "bits", "size", "largest error", "notes")
        kinds = [(kind, str(len(rows)), *cells(rows)) for (kind, *_), rows in groups.items()]
        return (html_table(repr(self)[1:-1], ("layers", "number", *heads), kinds)
                + "<p>An error is ‖W − Ŵ‖ / ‖W‖ of the weights.</p><details><summary>Each layer</summary>"
                + html_table("", ("layer", *heads), [(row.name, *cells([row])) for row in self.layers])
                + "</details>")

    @cached_property
    def _tensors(self) -> ShardedTensors:
        return ShardedTensors(self.path)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor, of a model around the text model none, without reading any."""
        if self.manifest.outer is None:
            return self._tensors.infos
        return self._text_infos

    @cached_property
    def _text_infos(self) -> Mapping[str, TensorInfo]:
        outer = self.manifest.outer
        assert outer is not None
        return {name: replace(info, name=name) for stored, info in self._tensors.infos.items()
                if (name := outer.text_name(stored)) is not None}

    @property
    def stored_names(self) -> set[str]:
        """What the files call all of their tensors."""
        return set(self._tensors.infos)

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        """A row for every Linear, in the model's order."""
        return self.manifest.layers

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all Linears over their parameters."""
        return self.manifest.bits_per_weight

    @property
    def file_bytes(self) -> int:
        return sum(r.bytes for name, r in self.manifest.files.items() if name.endswith(".safetensors"))

    def config(self) -> dict[str, Any]:
        """That of the text model, ``quantization_config`` included. Raises CheckpointError if it is
        malformed."""
        config = read_config(self.path) if self._config is None else dict(self._config)
        if self.manifest.outer is not None:
            quantization = {key: config[key] for key in KEYS if key in config}
            config = text_config(str(self.path), config) | quantization
        stored = stored_quantization(config)
        if stored and not (isinstance(stored, dict) and isinstance(stored.get("quant_method"), str)):
            raise CheckpointError(f"{self.path / CONFIG} is damaged", next=AGAIN,
                                  why="its quantization_config is no table with a quant_method")
        return config

    def has(self, name: str) -> bool:
        """Whether a tensor of that full name is stored."""
        return name in self.infos

    def tensor(self, name: str) -> torch.Tensor:
        """Read one stored tensor. Raises CheckpointError: it is unknown, or not finite."""
        try:
            return self._tensors.tensor(name if self.manifest.outer is None or name not in self.infos
                                        else self.manifest.outer.file_name(name))
        except SourceError as error:
            folder = shlex.quote(str(self.path))
            raise CheckpointError(error.what, why=error.why,
                                  next=f"quantkit verify {folder} finds all damage; then {AGAIN}") from error

    def quantized(self, layer: str) -> QuantizedTensor | None:
        """The packed weight of a layer (its name without ``.weight``); ``None`` if it isn't quantized.

        Raises:
            CheckpointError: its stored tensors are not those of its format.
        """
        row = self._rows.get(layer)
        if row is None or row.format is None or row.spec is None:
            return None
        layout = self._layout(row)
        return QuantizedTensor(row.format, row.spec, row.shape, FLOATS[row.dtype],
                               {suffix: self.tensor(f"{layer}.{suffix}") for suffix in layout})

    def side_files(self) -> Mapping[str, bytes]:
        """Tokenizer, generation config and whatever else was copied, by plain name."""
        side_files = {CONFIG, CARD, INDEX, GPTQ_CONFIG}
        return {name: (self.path / name).read_bytes() for name in self.manifest.files
                if name not in side_files and not name.endswith(".safetensors")}

    def check_structure(self) -> None:
        """Weights come from listed files only, and every layer's tensors exist with the dtype and
        shape of its format. Raises CheckpointError."""
        self.config()
        read = {Path(file).name for file in self._tensors.files}
        if strange := sorted(read - self.manifest.files.keys()):
            raise CheckpointError(f"{self.path} would be read from {', '.join(strange[:3])}", next=AGAIN,
                                  why=f"{MANIFEST} doesn't list it: files were added to the folder")
        for row in self.manifest.layers:
            if row.spec is not None:
                self._layout(row)
            elif (info := self.infos.get(f"{row.name}.weight")) is None or tuple(info.shape) != row.shape:
                raise CheckpointError(f"layer {row.name} of {self.path} has no weight of shape "
                                      f"{list(row.shape)}", why=f"{MANIFEST} lists it", next=AGAIN)

    def _layout(self, row: LayerRow) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        assert row.spec is not None and row.format is not None
        if row.dtype not in FLOATS:
            raise CheckpointError(f"layer {row.name} has dtype {row.dtype!r} in {self.path / MANIFEST}",
                                  why=f"known: {', '.join(FLOATS)}", next=AGAIN)
        form: Format = registry("formats").get(row.format)
        try:
            layout = packing.layout(form, row.spec, row.shape, FLOATS[row.dtype])
        except SpecError as error:
            raise CheckpointError(f"layer {row.name} of {self.path} can't be what {MANIFEST} says",
                                  why=error.why or error.what, next=AGAIN) from error
        for suffix, (dtype, shape) in layout.items():
            info = self.infos.get(f"{row.name}.{suffix}")
            if info is None or info.dtype != dtype or tuple(info.shape) != shape:
                actual = f"{info.dtype} {list(info.shape)}" if info else "missing"
                raise CheckpointError(
                    f"tensor {row.name}.{suffix} of {self.path} is {actual}", next=AGAIN,
                    why=f"{row.format} {row.spec.label()} of a layer {list(row.shape)} "
                        f"has {dtype} {list(shape)} there")
        return layout

    def release(self) -> None:
        """What was read of the files needn't stay in memory; it is read again when it is needed."""
        if "_tensors" in self.__dict__:
            self._tensors.release()

    def mapped_files(self) -> Sequence[MappedFile]:
        """See :class:`~quantkit.sources.base.ModelSource`."""
        return [*self._tensors.files.values()]

    def close(self) -> None:
        if "_tensors" in self.__dict__:
            self._tensors.close()
            del self.__dict__["_tensors"]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished checkpoint. Raises CheckpointError, saying what the folder is instead."""
    refuse_unfinished(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder", next="give the folder of a checkpoint")
    if is_unfinished(folder):
        raise unfinished(folder, f"{folder} is an unfinished checkpoint")
    file = folder / MANIFEST
    if not file.is_file():
        if (method := foreign_method(folder)) is not None:
            raise CheckpointError(f"{folder} is quantized (quant_method {method!r}) but has no {MANIFEST}",
                                  why="another tool made it, or that file was lost",
                                  next=f"quantkit inspect {shlex.quote(str(folder))}")
        raise CheckpointError(f"{folder} is no quantkit checkpoint", why=f"it has no {MANIFEST}",
                              next=f"quantkit quantize {shlex.quote(str(folder))} --recipe int8 --out OUT")
    with reading(file, CheckpointError), open_regular(file) as handle:
        raw = handle.read(MAX_BYTES + 1)
    return Manifest.from_bytes(raw, str(file))


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``. Raises CheckpointError if it is missing, malformed or too large."""
    return read_object(folder / CONFIG, MAX_CONFIG, error=CheckpointError, next=AGAIN, infinities=True)


def foreign_method(folder: Path) -> str | None:
    """The ``quant_method`` of a folder whose ``config.json`` says how it is quantized, else ``None``; also if
    all of its weights are plain, whatever that says."""
    try:
        config = read_config(folder)
        stored = stored_quantization(config)
    except QuantkitError:
        return None
    if not isinstance(stored, dict) or has_leftover_words(folder, config):
        return None
    return str(stored.get("quant_method"))


def _check_formats(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError for a format that isn't installed; it names the plugins of the checkpoint."""
    known = registry("formats")
    missing = next((row.format for row in manifest.layers if row.format and row.format not in known), None)
    if missing is not None:
        plugins = [name for name in manifest.plugins if name != BUILTIN]
        made_with = ", ".join(f"{name} {manifest.plugins[name]}" for name in plugins)
        raise CheckpointError(
            f"{folder} has layers of the format {missing!r}, which isn't installed",
            why=f"it was made with {made_with}" if plugins else "no plugin that made it is named in it",
            next=f"pip install {' '.join(plugins)}, and look at QUANTKIT_PLUGINS" if plugins
            else "quantkit plugins list")
