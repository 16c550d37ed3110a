"""What a recipe says beside its layers: the calibration, transforms and a recovery. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from quantkit.support.frozen import Frozen
from quantkit.support.paths import local_path


class TransformSpec(Frozen):
    """A change to the model that keeps its function, made before weights are quantized.

    Attributes:
        name: a registered transform.
        options: its own, checked when a plan is made.
    """

    name: str = Field(min_length=1, max_length=64)
    options: dict[str, Any] = Field(default_factory=dict)


class RecoverySpec(Frozen):
    """Training of scales and norms after all layers are quantized.

    Attributes:
        name: a registered recovery.
        windows: the number of windows of the calibration's text, beyond those that layers are calibrated on;
            some of them aren't trained on and decide whether the result is kept.
        options: its own, checked when a plan is made.
    """

    name: str = Field(min_length=1, max_length=64)
    windows: int = Field(default=40, ge=2)
    options: dict[str, Any] = Field(default_factory=dict)


class CalibrationSpec(Frozen):
    """Which text a calibrated method sees.

    Attributes:
        text: ``builtin`` (passages of many kinds that ship with quantkit, then docstrings of Python's
            standard library: offline, and apart from the default evaluation text), a text file, a
            folder of them, a ``.jsonl`` or ``.parquet`` file of texts or conversations,
            ``hub:OWNER/NAME[:SPLIT][:FILE]``; or several of these. Or ``self``: the model writes it. Or
            ``random``: no text at all, but tokens drawn from the vocabulary.
        windows: the number of windows.
        window: tokens in each.
        seed: chooses the windows.
        importance: says what a token's error counts for in a layer: ``gradient`` (how much the model's
            answer depends on that layer there) or ``equal``.
        importance_windows: windows of which gradients are found, evenly spread; any other token counts for
            what theirs do on average at its place in a window.
        packing: how documents become windows: ``stream`` (one after another, cut anywhere),
            ``documents`` (each window begins where a document does and is filled with the next ones);
            ``auto``: ``documents`` where there are conversations.
        avoid: texts that will be evaluated on: what shares passages with them is left out.
    """

    text: str | Annotated[tuple[str, ...], Field(strict=False)] = "builtin"
    windows: int = Field(default=24, ge=1)
    window: int = Field(default=512, ge=8)
    seed: int = 0
    importance: Literal["gradient", "equal"] = "gradient"
    importance_windows: int = Field(default=4, ge=1)
    packing: Literal["auto", "stream", "documents"] = "auto"
    avoid: tuple[str, ...] = Field(default=(), strict=False)

    @field_validator("text")
    @classmethod
    def _named(cls, text: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not text or ("" in text and not isinstance(text, str)):
            raise ValueError("no text is named")
        if text != "self" and "self" in text and not isinstance(text, str):
            raise ValueError("text that the model writes itself can't be mixed with other texts")
        if text != "random" and "random" in text and not isinstance(text, str):
            raise ValueError("random tokens can't be mixed with texts")
        return text

    @property
    def self_written(self) -> bool:
        """Whether the model writes the text that it is calibrated on."""
        return self.text == "self"

    @property
    def texts(self) -> tuple[str, ...]:
        """What ``text`` names, one or several."""
        return (self.text,) if isinstance(self.text, str) else self.text

    def without_folders(self) -> CalibrationSpec:
        """The same, with no folder of this machine in it."""
        names = tuple(map(_last_part, self.texts))
        return self.model_copy(update={"text": names[0] if isinstance(self.text, str) else names,
                                       "avoid": tuple(map(_last_part, self.avoid))})


def tokens_of(text: str) -> str:
    """How the tokens of a calibration are called, by :attr:`CalibrationSpec.text`."""
    return "tokens drawn at random" if text == "random" else f"tokens of {text}"


def _last_part(text: str) -> str:
    if text.startswith("hub:"):
        return text
    return (local_path(text) or Path(text)).name or text
