"""Text that a recovery is trained on: windows that the layers weren't calibrated on.

On its calibration text a model of few bits is much closer to the original than elsewhere, since its codes
were chosen for that text: what would be learned there holds nowhere else.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quantkit.checkpoint.coverage import SHARED
from quantkit.models.architecture import parse_config
from quantkit.quantization.calibration.data import (
    RANDOM,
    SELF,
    CalibrationData,
    check_length,
    load_calibration,
    own_calibration,
)
from quantkit.quantization.calibration.windows import TooFewWindowsError
from quantkit.quantization.specs import CalibrationSpec, RecoverySpec
from quantkit.sources.base import ModelSource
from quantkit.support.errors import CalibrationError
from quantkit.support.progress import Listener
from quantkit.text.tokenizer import Tokenizer

HELD_OUT = 8
"""Of every eight windows one is held out; those are the last."""
_GRAM = 8


@dataclass(frozen=True)
class RecoveryText:
    """What a recovery is trained and judged on.

    Attributes:
        tokens: int64 ``[windows, length]``, the training windows first.
        held_out: how many of the last ones judge the result.
        origins: of each window, where it begins.
    """

    tokens: torch.Tensor
    held_out: int
    origins: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Of the tokens as little-endian int64."""
        return hashlib.sha256(self.tokens.numpy().astype("<i8").tobytes()).hexdigest()


def refuses_text(spec: CalibrationSpec) -> str | None:
    """Why no recovery can be trained on such a text; ``None`` if one can."""
    if RANDOM in spec.texts:
        return "on tokens drawn at random the original model's answers are those of no text"
    if SELF in spec.texts:
        return "text that the model writes is as long as the calibration, which leaves nothing to train on"
    return None


def recovery_text(spec: CalibrationSpec, windows: int, seen: torch.Tensor, source: ModelSource,
                  listen: Listener, strict: bool = False) -> RecoveryText:
    """Windows of the calibration's text beyond those that layers are calibrated on.

    Args:
        spec: the calibration.
        windows: how many are wanted.
        seen: what layers are calibrated on, int64 ``[windows, tokens]``; none if they aren't.
        source: the model: its tokenizer and chat template.
        listen: told of downloads.
        strict: a row that can't be used is an error.

    Warns:
        UserWarning: windows share passages with a text that models are evaluated on; or rows can't be used,
            where no layer is calibrated on the text.

    Raises:
        CalibrationError: there is too little text, or its windows don't fit the model.
    """
    hf = source.config()
    tokenizer, config = Tokenizer(source.side_files(), hf), parse_config(hf)
    check_length(spec, config.max_position_embeddings)
    more = spec.model_copy(update={"windows": len(seen) + windows})
    try:
        data = load_calibration(more, tokenizer, config.vocab_size, 0, listen, strict)
    except TooFewWindowsError as error:
        raise _too_little(windows, error.why or error.what, error.windows - len(seen)) from None
    counts = Counter(gram for row in seen.tolist() for gram in _grams(row))
    fresh = [place for place, row in enumerate(data.tokens.tolist()) if _is_new(row, counts)][:windows]
    if len(fresh) < windows:
        total = len(data.tokens)
        raise _too_little(windows, f"of {total} windows {len(fresh)} are new beside the {len(seen)} that "
                                   f"layers are calibrated on, the other {total - len(fresh)} repeat them",
                          len(fresh))
    tokens = data.tokens[fresh]
    coverage = own_calibration(spec, tokenizer, tokens, config.vocab_size, 0).coverage
    unusable = [] if len(seen) else data.coverage.row_warnings()
    for text in [*unusable, *coverage.overlap_warnings("recovery")]:
        warnings.warn(text, stacklevel=2)
    return RecoveryText(tokens, max(1, windows // HELD_OUT),
                        tuple(data.origins[place] for place in fresh))


def recipe_text(recover: RecoverySpec | None, spec: CalibrationSpec | None, source: ModelSource,
                data: CalibrationData | None, listen: Listener, strict: bool = False) -> RecoveryText | None:
    """The text of a plan's recovery; ``None`` if it has no recovery.

    Args:
        recover: of the plan's recipe.
        spec: its calibration.
        source: the model.
        data: what layers are calibrated on, if they are.
        listen: told of downloads.
        strict: a row that can't be used is an error.

    Raises:
        CalibrationError: see :func:`recovery_text`.
    """
    if recover is None or spec is None:
        return None
    seen = torch.zeros(0, spec.window, dtype=torch.int64) if data is None else data.tokens
    return recovery_text(spec, recover.windows, seen, source, listen, strict)


def _grams(row: list[int]) -> set[tuple[int, ...]]:
    return {tuple(row[i:i + _GRAM]) for i in range(max(1, len(row) - _GRAM + 1))}


def _is_new(row: list[int], counts: Mapping[tuple[int, ...], int]) -> bool:
    """Whether a window repeats no calibration window. What several of them share, such as a chat template or
    a system prompt, is left out of the comparison, unless the window has next to nothing beside it.

    Args:
        row: the window.
        counts: in how many calibration windows each n-gram is.
    """
    grams = _grams(row)
    distinct = [gram for gram in grams if counts.get(gram, 0) < 2]
    if len(distinct) < SHARED * len(grams):
        return False
    return sum(gram in counts for gram in distinct) < SHARED * len(distinct)


def _too_little(windows: int, why: str, enough: int = 0) -> CalibrationError:
    """The error; ``enough``: a number of windows that would do, if it is known."""
    fewer = f": recover: {{name: …, windows: {enough}}}" if enough >= 2 else ""
    return CalibrationError(f"the calibration text is too short for {windows} windows of recovery", why=why,
                            next=f"give more text, or fewer windows in the recipe{fewer}")
