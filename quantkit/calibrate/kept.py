"""Gradients that an earlier run found for the same model and text, in the user's cache folder.

They are two walks through the model, more than half of the time that ``gptq`` takes, and depend neither on
the bits nor on the method: the next recipe, or a budget, is spared them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quantkit import __version__
from quantkit.sources.base import ModelSource
from quantkit.spec import TransformSpec
from quantkit.transforms.apply import resolve
from quantkit_kernels.cpu.compiled import cache_folder

LEAST = 1 << 20
"""Numbers: fewer are found again as quickly as they are looked for."""
MOST = 8
"""Files that are kept, the newest; one takes 4 bytes for each token and Linear."""
Gradients = dict[str, torch.Tensor]


def gradients(source: ModelSource, transforms: Sequence[TransformSpec], tokens: torch.Tensor, seed: int,
              wanted: Sequence[str], device: torch.device, find: Callable[[], Gradients]) -> Gradients:
    """What ``find`` gives, as ``token_gradients`` does; from an earlier run if there was one.

    Args:
        source: of the model, in its changed form.
        transforms: that changed it.
        tokens: int64 ``[samples, length]``.
        seed: of the answers that are drawn.
        wanted: full names of Linears.
        device: where ``find`` computes: sums are made in another order on another.
        find: walks through the model.
    """
    identity = source.identity()
    folder = cache_folder()
    known = identity.pinned or identity.files
    if folder is None or not known or tokens.numel() * len(wanted) < LEAST:
        return find()
    text = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    key = {"quantkit": __version__, "torch": torch.__version__, "seed": seed, "device": device.type,
           "tokens": [text, list(tokens.shape)],
           "source": [identity.kind, "" if identity.files else identity.uri, identity.revision,
                      dict(identity.files)], "wanted": sorted(wanted),
           "transforms": [spec.model_dump(mode="json") for spec, (one, _) in zip(
               transforms, resolve(transforms), strict=True) if one.layer is None]}
    file = folder.with_name("gradients") / f"{_digest(key)}.safetensors"
    found = _read(file, wanted, tokens.numel())
    if found is None:
        found = find()
        with contextlib.suppress(OSError):  # what can't be kept is found again
            _write(file, found)
    return found


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _read(file: Path, wanted: Sequence[str], tokens: int) -> Gradients | None:
    try:
        found = load_file(file)
    except (OSError, SafetensorError):
        return None
    if set(found) != set(wanted) or any(
            one.dtype != torch.float32 or one.shape != (tokens,) or not bool(torch.isfinite(one).all())
            for one in found.values()):
        return None
    return {name: found[name] for name in wanted}


def _write(file: Path, found: Gradients) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
        pass
    try:
        save_file({name: one.contiguous().clone() for name, one in found.items()}, part.name)
        Path(part.name).replace(file)
    except BaseException:
        Path(part.name).unlink(missing_ok=True)
        raise
    others = sorted(file.parent.glob("*.safetensors"), key=lambda one: one.stat().st_mtime, reverse=True)
    for one in others[MOST:]:
        one.unlink(missing_ok=True)
