"""Evaluation suites: what is measured, in YAML, found as recipes are, or in a file of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from quantkit.evaluation.text import BUILTIN, HUB
from quantkit.plugins.manager import current
from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.frozen import Frozen
from quantkit.support.safe_yaml import read_yaml

SUFFIXES = (".yaml", ".yml")


class SuiteText(Frozen):
    """A text of a suite.

    Attributes:
        name: how reports call it.
        text: ``builtin:code``, ``hf://datasets/…`` or the name of a file beside the suite's.
        windows: the windows of it that are used; ``None``: as many as the suite says.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,31}$")
    text: str = Field(pattern=r"^(builtin(:[a-z]+)?|hf://datasets/.+|[A-Za-z0-9][A-Za-z0-9 ._-]*)$")
    windows: int | None = Field(default=None, ge=1)


class SuiteSpeed(Frozen):
    """Which speeds a suite measures.

    Attributes:
        batches, contexts: of decoding.
        prefill, max_tokens: tokens of a prompt, and new ones of a timed run.
        repeats: the number of timed runs.
    """

    batches: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(default=(1,), strict=False,
                                                                      min_length=1)
    contexts: tuple[Annotated[int, Field(ge=0, le=1 << 24)], ...] = Field(default=(), strict=False)
    prefill: int | None = Field(default=None, ge=1, le=1 << 24)
    max_tokens: int = Field(default=32, ge=1, le=1 << 24)
    repeats: int = Field(default=3, ge=1)


class EvalSuite(Frozen):
    """One suite.

    Attributes:
        name, description: for people.
        text: the only text, if ``texts`` names none.
        texts: each is scored, and has a row in reports.
        window, windows: tokens a window, and windows of a text.
        prompt_tokens: tokens at the beginning of a window that go through the KV cache as its prompt.
        floor: whether the reference is compared with its weights in float32 arithmetic: the noise floor.
        tasks: the tasks that are asked if there is a folder with their data.
        limit: items of a task.
        speed: the batches and contexts that are timed.
        roofline: whether operators are timed below the machine's ceilings.
        sensitivity: whether the cost of 4 bits is measured for each layer.
    """

    name: str
    description: str
    text: str = BUILTIN
    texts: tuple[SuiteText, ...] = Field(default=(), strict=False, max_length=32)
    window: int = Field(default=512, ge=2)
    windows: int = Field(default=40, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)
    floor: bool = False
    tasks: tuple[str, ...] = Field(default=(), strict=False, max_length=64)
    limit: int | None = Field(default=None, ge=1)
    speed: SuiteSpeed = SuiteSpeed()
    roofline: bool = False
    sensitivity: bool = False

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [text.name for text in self.texts]
        if len(set(names)) < len(names):
            raise ValueError("two texts have the same name")
        return self


def load_suite(name: str) -> EvalSuite:
    """Find a suite by its name, or read a file that ends in ``.yaml``.

    Raises:
        UsageError: none or several are called so, or its file is missing or malformed.
    """
    if name.endswith(SUFFIXES):
        return _read(Path(name).expanduser())
    files: dict[str, list[tuple[str, Path]]] = {}
    for info, path in current().files("eval_dirs"):
        files.setdefault(path.stem, []).append((info.distribution, path))
    if name not in files:
        first = "quick" if "quick" in files else next(iter(sorted(files)), "FILE.yaml")
        raise UsageError(f"no evaluation suite is called {name!r}", why=did_you_mean(name, files),
                         next=f"quantkit eval … --suite {first}")
    if len(files[name]) > 1:
        raise UsageError(f"two suites are called {name!r}",
                         why=" and ".join(f"{path} (of {owner})" for owner, path in files[name]),
                         next=f"uninstall one: pip uninstall {files[name][-1][0]}")
    return _read(files[name][0][1])


def _read(path: Path) -> EvalSuite:
    """A suite whose own files are found beside it, and nowhere else: a file's content names no path."""
    suite = read_yaml(path, UsageError).build(EvalSuite)
    return suite.model_copy(update={"texts": tuple(
        text if text.text.startswith((BUILTIN, HUB))
        else text.model_copy(update={"text": str(path.parent / text.text)}) for text in suite.texts)})
