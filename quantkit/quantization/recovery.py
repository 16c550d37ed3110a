"""The hook for recoveries: what a plugin may do to a quantized model before it becomes a checkpoint.

A recovery runs once all layers are stored. Codes stay as they are, and so do bits, formats and kernels;
scales, norms and biases may change, so that the model's answers come closer to the original's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.checkpoint.manifest import RecoveryRecord
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Weights
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.data import CalibrationData, tokens_sha256
from quantkit.quantization.memory import PlanRow
from quantkit.quantization.methods.base import MethodOptions, checked_options
from quantkit.quantization.recipe import CalibrationSpec, Recipe
from quantkit.sources.base import ModelSource
from quantkit.support.errors import RecipeError
from quantkit.support.progress import Listener, Phases


@dataclass(frozen=True)
class RecoveryText:
    """The text that a recovery is trained and judged on.

    Attributes:
        tokens: int64 ``[windows, length]``, the training windows first.
        held_out: the number of windows at the end that aren't trained on and judge the result.
        origins: for each window, the place in the text where it begins.
    """

    tokens: torch.Tensor
    held_out: int
    origins: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        return tokens_sha256(self.tokens)


@dataclass(frozen=True)
class RecoveryJob:
    """A run of ``quantkit quantize``, as its recovery sees it.

    Attributes:
        recipe: the plan's recipe, which has a recovery.
        rows: the plan's rows. A row's :attr:`~quantkit.quantization.memory.PlanRow.unit` names the
            unit of the writer that its tensors are in.
        other: the names of the tensors that aren't quantized.
        weights: reads the original model's tensors, in the dtype and on the device of calibration.
        text: the text that :meth:`Recovery.read_text` returned.
        phases: reports progress by the names in :attr:`Recovery.phases`.
        strict: a result that isn't kept is an error.
    """

    recipe: Recipe
    rows: Sequence[PlanRow]
    other: Sequence[str]
    source: ModelSource
    weights: Weights
    text: RecoveryText
    phases: Phases
    strict: bool


class Recovery(ABC):
    """A registered recovery.

    Attributes:
        name: its name in recipes.
        paper: link to the paper.
        options: the model of its options.
        phases: the names of its phases, as progress shows them.
    """

    name: str
    paper: str
    options: type[MethodOptions] = MethodOptions
    phases: tuple[str, ...] = ()

    @abstractmethod
    def reason_against(self, recipe: Recipe, rows: Sequence[PlanRow], config: ModelConfig) -> str | None:
        """Why it can't recover what a plan makes; ``None`` if it can. Called before any work."""

    @abstractmethod
    def read_text(self, spec: CalibrationSpec, windows: int, seen: torch.Tensor, source: ModelSource,
                  progress: Listener, strict: bool) -> RecoveryText:
        """Read the text before any work.

        Args:
            spec: the recipe's calibration.
            windows: the number of windows that the recipe asks for.
            seen: the windows that layers are calibrated on, int64 ``[windows, tokens]``; empty if none are.
            source: the model, with its tokenizer and chat template.
            progress: is told of downloads.
            strict: a row that can't be used is an error.

        Raises:
            CalibrationError: there is too little text, or it doesn't fit the model.
        """

    @abstractmethod
    def mend(self, job: RecoveryJob, writer: CheckpointWriter) -> None:
        """Finish what an earlier attempt was stopped in, before any layer is made. Raises CheckpointError for
        a damaged unit that can't be made again."""

    @abstractmethod
    def recover(self, job: RecoveryJob, writer: CheckpointWriter) -> RecoveryRecord:
        """Train, unless an earlier attempt has, and replace what became better in the finished units. A run
        that is stopped at any instant and started again must end with the same bytes.

        Raises:
            QuantkitError: the result isn't kept, and the job is strict.
        """


def find_recovery(recipe: Recipe) -> Recovery | None:
    """The recovery that a recipe names; ``None`` if it names none. Raises UsageError for an unknown one."""
    if recipe.recover is None:
        return None
    recovery: Recovery = registry("recoveries").get(recipe.recover.name)
    return recovery


def recovery_options(recipe: Recipe) -> MethodOptions:
    """The options of the recipe's recovery. Raises RecipeError for an option that it can't take."""
    recovery = find_recovery(recipe)
    assert recovery is not None and recipe.recover is not None
    return checked_options(f"recovery {recovery.name}", recovery.options, recipe.recover.options)


def check_recovery(recipe: Recipe, rows: Sequence[PlanRow], config: ModelConfig) -> None:
    """Raise RecipeError if the recipe has a recovery that can't take its options or what the plan makes.

    Args:
        recipe: with its calibration filled in.
    """
    if (recovery := find_recovery(recipe)) is None:
        return
    recovery_options(recipe)
    if (why := recovery.reason_against(recipe, rows, config)) is not None:
        raise RecipeError(f"recipe {recipe.name!r} can't be recovered by {recovery.name}", why=why,
                          next="leave 'recover' out of the recipe")


def read_recovery_text(recipe: Recipe, source: ModelSource, data: CalibrationData | None, progress: Listener,
                       strict: bool = False) -> RecoveryText | None:
    """The text of a plan's recovery; ``None`` if it has no recovery. ``data``: what layers are calibrated on.
    Raises CalibrationError, see :meth:`Recovery.read_text`."""
    spec = recipe.calibration
    if (recovery := find_recovery(recipe)) is None or recipe.recover is None or spec is None:
        return None
    seen = torch.zeros(0, spec.window, dtype=torch.int64) if data is None else data.tokens
    return recovery.read_text(spec, recipe.recover.windows, seen, source, progress, strict)
