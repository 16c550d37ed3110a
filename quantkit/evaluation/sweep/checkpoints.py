"""Quantizes what a comparison lacks, and checks that what is there is what would be made."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from quantkit import __version__
from quantkit.checkpoint.manifest import SourceRecord
from quantkit.checkpoint.reader import Checkpoint
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import CalibrationSpec, load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import CheckpointError, UsageError
from quantkit.support.progress import Listener, silent

SUFFIXES = (".yaml", ".yml")


def folders_of(recipes: Sequence[str], out: Path) -> dict[str, Path]:
    """Where each recipe's checkpoint is or will be: recipe → folder.

    Raises:
        UsageError: a recipe is given twice, or two have the same name.
        RecipeError: a recipe isn't there, or is malformed.
    """
    folders: dict[str, Path] = {}
    for recipe in recipes:
        load_recipe(recipe)
        name = Path(recipe).stem if recipe.endswith(SUFFIXES) else recipe
        if name.startswith("."):
            raise UsageError(f"the name of {recipe} begins with a dot", next="give the file another name")
        folder = out / name
        if recipe in folders or folder in folders.values():
            raise UsageError(f"recipe {recipe} is given twice, or another file has its name",
                             next="name each recipe once")
        folders[recipe] = folder
    return folders


def made(model: str, recipe: str, folder: Path, *, revision: str | None = None,
         calibration: CalibrationSpec | None = None, progress: Listener = silent,
         begins: Callable[[bool], object] = lambda there: None, device: str = "cpu") -> bool:
    """Make a checkpoint, or check the one that is there.

    Args:
        model, revision: the source.
        recipe: a name or a file.
        folder: the place of the checkpoint.
        calibration: instead of the recipe's, if it has one.
        progress: hears how quantizing goes on.
        begins: told whether the folder is there.
        device: the device of calibrated recipes.

    Returns:
        whether it was made now.

    Raises:
        CheckpointError: what is there is damaged, unfinished, or made from something else.
        QuantkitError: as :func:`~quantkit.quantization.run.quantize`.
    """
    begins(folder.exists())
    if folder.exists():
        _check(model, recipe, folder, revision, calibration)
        return False
    quantize(model, recipe, folder, revision=revision, calibration=calibration, progress=progress,
             device=device)
    return True


def _check(model: str, recipe: str, folder: Path, revision: str | None,
           calibration: CalibrationSpec | None) -> None:
    again = f"rm -r {shlex.quote(str(folder))} and run the same command, or choose another --out"
    with Checkpoint.open(folder) as checkpoint:
        manifest = checkpoint.manifest
    with closing(open_source(model, revision)) as source:
        wanted = load_recipe(recipe)
        if calibration is not None:
            wanted = wanted.model_copy(update={"calibration": calibration})
        for claim, is_so, should in (
                ("model", manifest.source, SourceRecord.of(source.identity())),
                ("recipe", manifest.recipe, make_plan(wanted, source).recipe.snapshot()),
                ("version of quantkit", manifest.quantkit_version, __version__)):
            if is_so != should:
                raise CheckpointError(f"{folder} is not what {recipe} would make of {model}",
                                      why=f"it was made from another {claim}", next=again)
    report = verify(folder)
    if not report.ok:
        raise CheckpointError(f"{folder} is damaged", next=again,
                              why="; ".join(f"{check.name}: {check.detail}" for check in report.failed[:3]))
