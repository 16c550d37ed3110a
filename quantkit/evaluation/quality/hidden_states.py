"""What a model leaves of a text before its head, in a file, of which logits are made when they are scored.

So models are compared one after the other, and only one of them is in memory. The hidden states take a
hundredth of the room that logits would, and nothing is lost: a head gives a row the same bits alone as beside
others.
"""

from __future__ import annotations

import copy
import io
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from quantkit.evaluation.quality.blocks import (
    SIDE_BY_SIDE,
    MaskedText,
    begin_text,
    masked_logits,
    masked_states,
    orders_of,
    side_by_side,
)
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.speed.decoding import weights_in_memory
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import QuantkitError
from quantkit.support.progress import Listener, ProgressEvent, silent

Runner = LoadedModel | TeacherForcedModel


class WindowLogits:
    """Logits ``[T, vocab]`` of a window; ``logits[start:stop]`` computes a part of them.

    Args:
        loaded: the model, of whose network the head is enough.
        hidden: what its last layer leaves, ``[T, hidden]``.
        number: the number of the window, for messages.
    """

    def __init__(self, loaded: LoadedModel, hidden: torch.Tensor, number: int) -> None:
        self._loaded, self._hidden, self._number = loaded, hidden, number
        self.shape = len(hidden), loaded.config.vocab_size

    def __getitem__(self, part: slice) -> torch.Tensor:
        """Raises QuantkitError: they aren't finite."""
        logits = masked_logits(self._loaded, self._hidden[part])
        if not (logits < torch.inf).all():
            dtype = str(self._loaded.dtype).removeprefix("torch.")
            raise QuantkitError(f"{self._loaded.uri} gives logits that are not finite",
                                why=f"at window {self._number}: {dtype} overflows", next="--dtype float32")
        return logits


class HiddenStates:
    """What a model leaves of all windows of a text.

    Args:
        runner: the model, whose layers aren't needed afterwards.
        tokens: int64 ``[windows, window]``.
        prompt: tokens at the beginning of a window that aren't scored; a :class:`TeacherForcedModel` has the
            same.
        folder: where the file is; ``None``: where temporary files are. It has no name there, so that nothing
            is left of it, whatever ends the process.
        progress: told before each window.

    Attributes:
        runner: the model without its layers, for what is known of it.
        tokens: as they were given.

    Raises:
        QuantkitError: the disk is full, or nothing can be written there.
    """

    def __init__(self, runner: Runner, tokens: torch.Tensor, prompt: int = 0, folder: Path | None = None,
                 progress: Listener = silent) -> None:
        self.tokens = tokens
        with _writing(folder):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._file = _unnamed_file(folder)
        weakref.finalize(self, self._file.close)
        states = states_of(runner, tokens, prompt)
        for number in range(len(tokens)):
            progress(ProgressEvent(number, len(tokens), label_of(runner)))
            rows = next(states).cpu().contiguous()
            with _writing(folder):
                self._file.write(rows.view(torch.uint8).numpy().data)
                self._file.flush()
        self._like = torch.empty_like(rows, device="meta")
        loaded = model_of(runner)
        self._loaded = replace(loaded, model=loaded.model.head_alone(),
                               weight_bytes=weights_in_memory(loaded))
        self.runner: Runner = self._loaded
        if isinstance(runner, TeacherForcedModel):
            self.runner = copy.copy(runner)
            self.runner.loaded = self._loaded
        loaded.check_files()
        for file in loaded.files:  # what is scored next needs the head only
            file.release()

    def window(self, number: int) -> WindowLogits:
        rows = torch.empty_like(self._like, device="cpu")
        self._file.seek(number * rows.nbytes)
        self._file.readinto(rows.view(torch.uint8).numpy().data)
        return WindowLogits(self._loaded, rows, number)


def runner_of(model: Runner | HiddenStates) -> Runner:
    return model.runner if isinstance(model, HiddenStates) else model


def model_of(runner: Runner) -> LoadedModel:
    return runner.loaded if isinstance(runner, TeacherForcedModel) else runner


def label_of(runner: Runner) -> str:
    """How progress calls it."""
    return runner.label if isinstance(runner, LoadedModel) else f"{runner.loaded.label} kv {runner.kv}"


@torch.inference_mode()
def states_of(runner: Runner, tokens: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """What the last layer leaves of each window, ``[T, hidden]``, where it predicts the tokens behind the
    prompt and its first one.

    Raises:
        UsageError: the model writes blocks, and can't with this KV setting or on this device.
    """
    if model_of(runner).config.diffusion is not None:
        yield from _states_of_blocks(runner, tokens, prompt)
        return
    for window in tokens:
        if isinstance(runner, TeacherForcedModel):
            yield runner.hidden(window)[:-1]
        else:
            yield runner.model.hidden(window[None].to(runner.model.device))[0, prompt:-1]


def _states_of_blocks(runner: Runner, tokens: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    loaded, known = model_of(runner), 1 + prompt
    spec = runner.kv if isinstance(runner, TeacherForcedModel) else KVSpec()
    cache = KVCache(loaded.config, spec, loaded.dtype, loaded.model.device)
    for part in tokens.split(min(SIDE_BY_SIDE, side_by_side(cache, tokens.shape[1]))):
        texts = [MaskedText(begin_text(loaded, cache, ids, known), ids, known,
                            orders_of(loaded, ids, known, 1)[0]) for ids in part.tolist()]
        states = masked_states(loaded, cache, texts)
        if isinstance(runner, TeacherForcedModel):
            runner.kv_bytes = cache.bytes_of(texts[-1].row)
            runner.kv_bytes_per_token = cache.bytes_per_token
        cache.free([text.row for text in texts])
        yield from states


def _unnamed_file(folder: Path | None) -> io.BufferedRandom:
    return tempfile.TemporaryFile(dir=folder)


@contextmanager
def _writing(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise QuantkitError(f"what the reference makes of a text can't be kept in "
                            f"{folder or tempfile.gettempdir()}", why=error.strerror or str(error),
                            next="free some space, or keep it elsewhere: QUANTKIT_CACHE=DIR quantkit eval …"
                            ) from error
