"""What a quantized tensor is, in numbers: frozen, strict and free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from quantkit.paths import local_path

Kind = Literal["int", "nf", "fp", "iq", "trellis"]
ScaleDtype = Literal["model", "bfloat16", "float16", "float32", "e4m3", "e8m0"]
GRIDS = ("int", "int minima", "int superblocks", "nf", "iq", "fp", "fp tiles", "fp4", "trellis")
"""What kinds of grid there are; see :attr:`QuantSpec.grid`."""
GROUP_SCALES = ("e4m3", "e8m0")
"""Dtypes of the scales of 4-bit floating-point groups: NVFP4's and MXFP4's."""

NEWER = ("activations", "rotation", "window", "signed", "minimum", "superblock",
         "scale_bits")


class Frozen(BaseModel):
    """Base of every spec: immutable, no coercion, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Granularity(Frozen):
    """Which weights share one scale.

    For a weight of shape ``[out, in]``:

    - ``tensor``: one scale, shape ``[1, 1]``
    - ``channel``: one a row, ``[out, 1]``
    - ``group``: one for every ``size`` weights along ``in``, ``[out, in / size]``
    - ``block``: one for every ``size`` weights of the row-major flattened tensor (a block may
      cross rows), ``[ceil(out * in / size)]``: bitsandbytes' layout
    - ``tile``: one for every square of ``size`` by ``size`` weights, ``[ceil(out / size), ceil(in / size)]``:
      DeepSeek's layout
    """

    strategy: Literal["tensor", "channel", "group", "block", "tile"]
    size: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _size_belongs(self) -> Granularity:
        if (self.strategy in ("group", "block", "tile")) != (self.size is not None):
            raise ValueError(f"strategy {self.strategy!r} "
                             + ("needs a size" if self.size is None else "takes no size"))
        return self

    def __str__(self) -> str:
        return {"group": f"g{self.size}", "block": f"b{self.size}",
                "tile": f"t{self.size}"}.get(self.strategy, self.strategy)


class QuantSpec(Frozen):
    """How one weight is represented.

    Attributes:
        kind: ``int`` (uniform levels), ``nf`` (the NormalFloat codebook), ``fp`` (floating point of 8 bits,
            OCP's e4m3fn: https://arxiv.org/abs/2209.05433, or of 4 bits, e2m1:
            https://arxiv.org/abs/2310.10537), ``iq`` (the 16 levels of llama.cpp's IQ4_NL) or ``trellis`` (a
            code in which neighbors decide too).
        bits: bits a code.
        symmetric: no zero point; the level ``2 ** (bits - 1)`` means 0.
        granularity: which weights share a scale.
        scale_dtype: what scales are stored and rounded in; ``model`` follows the weight's dtype. ``e4m3`` are
            floating-point numbers of 8 bits times a float32 of the tensor's, ``e8m0`` powers of 2.
        nested: scales are themselves quantized to 8 bits (``nf`` only).
        signed: scales may be negative, so that the level that is farther from 0 than all others lies on the
            side where a group needs it (``int``, symmetric, in groups).
        minimum: groups have a minimum that isn't a whole number of steps in place of a zero point (``int``,
            asymmetric, in groups only): ``w = code * scale + minimum``.
        superblock: weights along *in* whose groups' scales (and minima) are whole numbers times one number
            of the superblock, which is stored in ``scale_dtype``.
        scale_bits: bits of those whole numbers: unsigned ones with minima, signed ones without.
        rotation: ``hadamard``: the columns are rotated (:mod:`quantkit.ops.hadamard`), and inputs must be.
        window: bits that decide a weight (``trellis`` only): the wider, the better, and twice the work to
            quantize for each.
        activations: what the weight is multiplied with is rounded too, as it comes, to the same kind and
            bits and without zero points. ``token``: with one scale a token. ``group``: with a scale for as
            many values of a token as share one in the weight. ``None``: it isn't.
    """

    kind: Kind = "int"
    bits: int = Field(ge=2, le=8)
    symmetric: bool = True
    granularity: Granularity
    scale_dtype: ScaleDtype = "model"
    nested: bool = False
    signed: bool = False
    minimum: bool = False
    superblock: int | None = Field(default=None, ge=4)
    scale_bits: int | None = Field(default=None, ge=4, le=8)
    rotation: Literal["hadamard"] | None = None
    window: int | None = Field(default=None, ge=10, le=16)
    activations: Literal["token", "group"] | None = None

    @model_validator(mode="after")
    def _coherent(self) -> QuantSpec:
        strategy, size = self.granularity.strategy, self.granularity.size or 0
        if self.kind == "nf" and (self.bits != 4 or strategy != "block"):
            raise ValueError("kind 'nf' means 4 bits in blocks")
        if self.kind == "int" and strategy in ("block", "tile"):
            raise ValueError("kind 'int' takes tensor, channel or group granularity")
        if self.kind == "iq" and not (self.bits == 4 and self.symmetric and strategy == "group"):
            raise ValueError("kind 'iq' means 4 bits, symmetric, in groups")
        if self.kind == "trellis" and (strategy != "channel" or self.bits > 4 or not self.symmetric):
            raise ValueError("kind 'trellis' means 2 to 4 bits, symmetric, a scale a channel")
        if (self.kind == "trellis") != (self.window is not None):
            raise ValueError(f"kind 'trellis' {'needs' if self.window is None else 'alone has'} a window")
        if self.nested and self.kind != "nf":
            raise ValueError("nested scales exist for kind 'nf' only")
        self._coherent_floats(strategy)
        if self.signed and (self.kind != "int" or not self.symmetric or strategy != "group"):
            raise ValueError("signed scales exist for kind 'int', symmetric, in groups")
        if self.minimum and (self.kind != "int" or self.symmetric or strategy != "group"):
            raise ValueError("minima exist for kind 'int', asymmetric, in groups")
        if (self.superblock is None) != (self.scale_bits is None):
            raise ValueError("superblock and scale_bits go together")
        if self.superblock is not None and (
                self.kind != "int" or strategy != "group" or self.superblock % size
                or self.symmetric == self.minimum):
            raise ValueError("superblocks are of whole groups of kind 'int', symmetric or with minima")
        self._coherent_activations(strategy)
        return self

    def _coherent_floats(self, strategy: str) -> None:
        grouped = self.scale_dtype in GROUP_SCALES
        if self.kind == "fp" and self.bits == 4:
            if not (self.symmetric and strategy == "group" and grouped):
                raise ValueError("kind 'fp' of 4 bits is symmetric, in groups, with e4m3 or e8m0 scales")
        elif self.kind == "fp" and not (self.bits == 8 and self.symmetric
                                        and strategy in ("tensor", "channel", "tile")):
            raise ValueError("kind 'fp' means 8 bits, symmetric, with tensor, channel or tile "
                             "granularity, or 4 bits in groups")
        elif grouped:
            raise ValueError(f"{self.scale_dtype} scales are for kind 'fp' of 4 bits")

    def _coherent_activations(self, strategy: str) -> None:
        eight = self.kind in ("int", "fp") and self.bits == 8 and self.symmetric
        if self.activations == "token" and not (eight and strategy in ("tensor", "channel")):
            raise ValueError("quantized activations go with weights of kind 'int' or 'fp', 8 bits, "
                             "symmetric, with tensor or channel granularity")
        if self.activations == "group" and not (self.kind == "fp" and strategy in ("group", "tile")):
            raise ValueError("activations with a scale a group go with weights of kind 'fp' in groups "
                             "or tiles")
        if self.static_inputs and self.rotation:
            raise ValueError("activations with e4m3 scales are measured as they come, not rotated")

    @model_serializer(mode="wrap")
    def _brief(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The spec without unused newer fields, so that older manifests and hashes stay the same."""
        data: dict[str, Any] = serialize(self)
        return {name: value for name, value in data.items()
                if name not in NEWER or value not in (None, False)}

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the scales of a weight ``[out, in]``."""
        rows, cols = shape
        size = self.granularity.size or 1
        return {"tensor": (1, 1), "channel": (rows, 1), "group": (rows, cols // size),
                "block": (-(-rows * cols // size),),
                "tile": (-(-rows // size), -(-cols // size))}[self.granularity.strategy]

    @property
    def grid(self) -> str:
        """Which of :data:`GRIDS` weights are rounded to: in these words methods say what they can produce."""
        if self.kind == "int":
            return "int superblocks" if self.superblock else "int minima" if self.minimum else "int"
        if self.kind == "fp" and self.bits == 4:
            return "fp4"
        return "fp tiles" if self.granularity.strategy == "tile" else self.kind

    @property
    def static_inputs(self) -> bool:
        """Whether a number of the layer's inputs is measured and stored: what the e4m3 scales of their groups
        are multiples of."""
        return self.activations == "group" and self.scale_dtype == "e4m3"

    def outer_shape(self, shape: tuple[int, int]) -> tuple[int, int] | None:
        """Shape of what scales are multiples of, for a weight ``[out, in]``; ``None``: of nothing."""
        if self.superblock is not None:
            return shape[0], shape[1] // self.superblock
        return (1, 1) if self.scale_dtype == "e4m3" else None

    def label(self) -> str:
        """A short name such as ``int4 g64 sym``, ``nf4 b64 nested``, ``fp8 channel a8`` (activations too),
        ``int4 g32 min s6`` (minima, and 6 bits for a scale) or ``trellis3 channel w12 rot``."""
        tail = {"nf": "nested" if self.nested else "", "iq": "", "trellis": f"w{self.window}",
                "fp": self.scale_dtype if self.scale_dtype in GROUP_SCALES else "",
                "int": "sym" if self.symmetric else "min" if self.minimum else "asym"}[self.kind]
        parts = (f"{self.kind}{self.bits}", str(self.granularity), tail,
                 f"s{self.scale_bits}" if self.scale_bits else "", "rot" if self.rotation else "",
                 f"a{self.bits}" if self.activations else "")
        return " ".join(filter(None, parts))


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
        windows: of the calibration's text, beyond those that layers are calibrated on; the last eighth isn't
            trained on and decides whether the result is kept.
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
        windows: how many there are.
        window: tokens in each.
        seed: chooses the windows.
        importance: what a token's error counts for in a layer: ``gradient`` (how much the model's
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


class KVSpec(Frozen):
    """How keys and values are kept: which positions stay, and how each is stored.

    Attributes:
        policy: a registered policy; ``all`` keeps everything.
        options: the policy's own, checked when it is made.
        codec: a registered codec; ``none`` stores what the model computes, in its dtype.
        codec_options: the codec's own.
        values, value_options: of values, if they have a codec of their own.
    """

    policy: str = "all"
    options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    codec: str = "none"
    codec_options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    values: str | None = None
    value_options: dict[str, int | float | str | bool] = Field(default_factory=dict)

    def __str__(self) -> str:
        # the same setting is always written the same way, so that it can be read again and compared
        codec = _call(self.codec, self.codec_options, "bits")
        if self.values is not None:
            codec += "/" + _call(self.values, self.value_options, "bits")
        policy = _call(self.policy, self.options, "budget")
        parts = [text for text, default in ((policy, "all"), (codec, "none")) if text != default]
        return "+".join(parts) or "none"


def _call(name: str, options: dict[str, int | float | str | bool], first: str) -> str:
    """``name(first, other=value)``."""
    written = {option: str(value).lower() if isinstance(value, bool) else str(value)
               for option, value in sorted(options.items(), key=lambda item: (item[0] != first, item))}
    inner = ", ".join(value if option == first else f"{option}={value}" for option, value in written.items())
    return name + (f"({inner})" if inner else "")
