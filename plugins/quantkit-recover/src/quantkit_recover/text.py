"""Text that a recovery is trained on: windows that the layers weren't calibrated on.

On its calibration text a model of few bits is much closer to the original than elsewhere, since its codes
were chosen for that text: what would be learned there holds nowhere else.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

import torch

from quantkit.checkpoint.manifest import SHARED
from quantkit.models.architecture import parse_config
from quantkit.quantization.calibration.data import (
    RANDOM,
    SELF,
    TooFewWindowsError,
    check_length,
    load_calibration,
    own_calibration,
)
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.quantization.recovery import RecoveryText
from quantkit.sources.base import ModelSource
from quantkit.support.errors import CalibrationError
from quantkit.support.progress import Listener
from quantkit.text.tokenizer import Tokenizer

HELD_OUT = 8
"""One of every eight windows is held out; those are the last ones."""
NGRAM = 8
"""Windows are compared by what tokens of theirs are the same, so many in a row."""


def reason_against_text(spec: CalibrationSpec) -> str | None:
    """Why no recovery can be trained on such a text; ``None`` if one can."""
    if RANDOM in spec.texts:
        return "on tokens drawn at random the original model's answers are those of no text"
    if SELF in spec.texts:
        return "text that the model writes is as long as the calibration, which leaves nothing to train on"
    return None


def recovery_text(spec: CalibrationSpec, windows: int, seen: torch.Tensor, source: ModelSource,
                  listen: Listener, strict: bool = False) -> RecoveryText:
    """Windows of the calibration's text beyond those that layers are calibrated on; see
    :meth:`quantkit.quantization.recovery.Recovery.read_text`.

    Warns:
        UserWarning: windows share passages with a text that models are evaluated on; or rows can't be used,
            where no layer is calibrated on the text.
    """
    hf = source.config()
    tokenizer, config = Tokenizer(source.side_files(), hf), parse_config(hf)
    check_length(spec, config.max_position_embeddings)
    more = spec.model_copy(update={"windows": len(seen) + windows})
    try:
        data = load_calibration(more, tokenizer, config.vocab_size, 0, listen, strict)
    except TooFewWindowsError as error:
        raise _too_little(windows, error.why or error.what, error.windows - len(seen)) from None
    counts = Counter(ngram for row in seen.tolist() for ngram in _ngrams(row))
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


def _ngrams(row: list[int]) -> set[tuple[int, ...]]:
    return {tuple(row[i:i + NGRAM]) for i in range(max(1, len(row) - NGRAM + 1))}


def _is_new(row: list[int], counts: Mapping[tuple[int, ...], int]) -> bool:
    """Whether a window repeats no calibration window. What several of them share, such as a chat template or
    a system prompt, is left out of the comparison, unless the window has next to nothing beside it.

    Args:
        row: the window's tokens.
        counts: the number of calibration windows that have each n-gram.
    """
    ngrams = _ngrams(row)
    distinct = [ngram for ngram in ngrams if counts.get(ngram, 0) < 2]
    if len(distinct) < SHARED * len(ngrams):
        return False
    return sum(ngram in counts for ngram in distinct) < SHARED * len(distinct)


def _too_little(windows: int, why: str, enough: int = 0) -> CalibrationError:
    """The error; ``enough`` is a number of windows that would do, if it is known."""
    fewer = f": recover: {{name: …, windows: {enough}}}" if enough >= 2 else ""
    return CalibrationError(f"the calibration text is too short for {windows} windows of recovery", why=why,
                            next=f"give more text, or fewer windows in the recipe{fewer}")
