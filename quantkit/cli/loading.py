"""Loads a model for a command, and says how far that is where it takes a while."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quantkit.api.progress import ProgressLine
from quantkit.cli.present import note

if TYPE_CHECKING:
    import torch

    from quantkit.checkpoint.open import AnyCheckpoint
    from quantkit.runtime.loader import LoadedModel
    from quantkit.sources.base import ModelSource
    from quantkit.text.tokenizer import Tokenizer

MOMENT = 2.0
"""Seconds of loading that nobody needs to be told of."""


def loading_line(model: str, quiet: bool = False) -> ProgressLine:
    """For the bytes of weights that are loaded; shown from the third second on."""
    return ProgressLine(f"loading {model}", quiet, after=MOMENT)


def load_model(model: str, *, revision: str | None = None, dtype: str = "auto", device: str = "auto",
               verify: bool = False, quiet: bool = False,
               on_open: Callable[[ModelSource | AnyCheckpoint, torch.device], object] = lambda source, device:
               None,
               on_tokenizer: Callable[[Tokenizer], object] = lambda tokenizer: None) -> LoadedModel:
    """:func:`quantkit.runtime.loader.load` with progress on stderr, unless ``quiet``."""
    from quantkit.checkpoint.open import model_around
    from quantkit.runtime.loader import load

    def opened(source: ModelSource | AnyCheckpoint, place: torch.device) -> None:
        if not quiet and (kind := model_around(source)) is not None:
            note(f"{model} is a {kind} model: its text part is run, images can't be given to it")
        on_open(source, place)

    with ProgressLine(f"verifying {model}", quiet or not verify) as verified, \
            loading_line(model, quiet) as loaded:
        return load(model, revision=revision, dtype=dtype, device=device, verify=verify, progress=verified,
                    loading=loaded, on_open=opened, on_tokenizer=on_tokenizer)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Importing and loading make a million objects that stay: looking for those that don't takes a tenth of
    the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_large(*modules: str) -> None:
    """Import modules by their full names, torch's for instance."""
    with collector_paused():
        for name in modules:
            importlib.import_module(name)
