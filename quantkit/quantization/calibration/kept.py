"""A cache of token gradients by model and text, in the user's cache folder.

They are two walks through the model, and depend neither on the bits nor on the method: the next recipe, or a
budget, is spared them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quantkit import __version__
from quantkit.quantization.specs import TransformSpec
from quantkit.quantization.transforms.base import resolve
from quantkit.sources.base import ModelSource
from quantkit.sources.local import sha256_file
from quantkit.support.errors import SourceError
from quantkit.support.paths import read_regular
from quantkit_kernels.kept import cache_folder

DRAWS = 2
"""Number of the way in which answers are drawn."""
LEAST = 1 << 16
"""Numbers: fewer are found again as quickly as they are looked for."""
MOST = 8
"""Files that are kept, the newest; one takes 4 bytes for each token and Linear."""
HASH = ".sha256"
PART = ".part"
DAY = 24 * 60 * 60
Gradients = dict[str, torch.Tensor]


def gradients(source: ModelSource, transforms: Sequence[TransformSpec], tokens: torch.Tensor, seed: int,
              wanted: Sequence[str], device: torch.device, find: Callable[[], Gradients]) -> Gradients:
    """What ``find`` gives, as ``token_gradients`` does; from an earlier run if there was one.

    Args:
        source: reads the model in its changed form.
        transforms: the transforms that changed it.
        tokens: int64 ``[windows, tokens]``.
        seed: the seed of the answers that are drawn.
        wanted: full names of Linears.
        device: the device on which ``find`` computes: sums are made in another order on another.
        find: walks through the model.
    """
    identity = source.identity()
    folder = cache_folder()
    known = identity.pinned or identity.files
    if folder is None or not known or tokens.numel() * len(wanted) < LEAST:
        return find()
    text = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    key = {"quantkit": __version__, "draws": DRAWS, "torch": torch.__version__, "seed": seed,
           "device": device.type,
           "tokens": [text, list(tokens.shape)],
           "source": [identity.kind, "" if identity.files else identity.uri, identity.revision,
                      dict(identity.files)], "wanted": sorted(wanted),
           "transforms": [spec.model_dump(mode="json") for spec, (transform, _) in zip(
               transforms, resolve(transforms), strict=True) if transform.layer is None]}
    file = folder.with_name("gradients") / f"{_digest(key)}.safetensors"
    gradients = _read(file, wanted)
    if gradients is None:
        gradients = find()
        with contextlib.suppress(OSError, SafetensorError, SourceError):  # what can't be kept is found again
            _write(file, gradients)
    return gradients


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _read(file: Path, wanted: Sequence[str]) -> Gradients | None:
    """``None`` unless the file is as it was written, by its own hash: a damaged one would change results."""
    try:
        if sha256_file(file) != read_regular(file.with_suffix(HASH), 64).decode():
            return None
        tensors = load_file(file)
        return {name: tensors[name] for name in wanted}
    except (OSError, ValueError, KeyError, SafetensorError, SourceError):
        return None


def _write(file: Path, gradients: Gradients) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, suffix=PART) as folder:
        part = Path(folder) / file.name
        save_file({name: tensor.contiguous().clone() for name, tensor in gradients.items()}, part)
        part.with_suffix(HASH).write_text(sha256_file(part), encoding="ascii")
        for path in (part, part.with_suffix(HASH)):
            path.replace(file.parent / path.name)
    others = sorted(file.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[MOST:]:
        path.unlink(missing_ok=True)
        path.with_suffix(HASH).unlink(missing_ok=True)
    for partial in file.parent.glob(f"*{PART}"):  # of a run that was killed
        if time.time() - partial.stat().st_mtime > DAY:
            shutil.rmtree(partial, ignore_errors=True)
