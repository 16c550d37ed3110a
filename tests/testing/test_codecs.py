"""Broken KV codecs, each by one fault, and what check_codec says of it."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from pydantic import Field

from quantkit.kv.base import KVCodec
from quantkit.plugins.manager import registry
from quantkit.support.errors import PluginError
from quantkit.testing import check_codec


class Vectors:
    """A correct one: 8 bits a number, a float32 scale a token."""

    name, hadamard = "zoo", False

    def layout(self, dim, dtype):
        return {"codes": ((dim,), torch.int8), "scale": ((), torch.float32)}

    def shared(self, dim, dtype):
        return {}

    def encode(self, x):
        x = x.float()
        scale = (x.abs().amax(-1) / 127).clamp(min=1e-30)
        return {"codes": (x / scale[..., None]).round().clamp(-127, 127).to(torch.int8), "scale": scale}

    def decode(self, parts):
        return parts["codes"].float() * parts["scale"][..., None]


def codec_of(side, **fields):
    """A codec class with this side for keys and values."""
    return type("Zoo", (KVCodec,), {"__annotations__": {"name": ClassVar[str]}, "name": "zoo",
                                    "__module__": __name__, "keys": lambda self: side(), **fields})


def test_the_correct_one_passes():
    check_codec(codec_of(Vectors))


class BuiltinName(Vectors):
    name = "int8"


class KernelName(Vectors):
    name = "hadamard4c"


class NoName(Vectors):
    name = ""


class HadamardText(Vectors):
    hadamard = "no"


class LayoutList(Vectors):
    def layout(self, dim, dtype):
        return [("codes", dim, torch.int8)]


class LayoutBare(Vectors):
    def layout(self, dim, dtype):
        return {"codes": (dim, torch.int8), "scale": ((), torch.float32)}


class LayoutCrashes(Vectors):
    def layout(self, dim, dtype):
        assert dim == 64
        return super().layout(dim, dtype)


class LayoutRefusesAll(Vectors):
    def layout(self, dim, dtype):
        from quantkit.support.errors import UsageError

        raise UsageError("no dimension suits this codec")


class PartMissing(Vectors):
    def encode(self, x):
        return {"codes": super().encode(x)["codes"]}


class PartTooMany(Vectors):
    def encode(self, x):
        parts = super().encode(x)
        return parts | {"peak": parts["scale"]}


class OtherDtype(Vectors):
    def encode(self, x):
        parts = super().encode(x)
        return parts | {"scale": parts["scale"].double()}


class OtherShape(Vectors):
    def encode(self, x):
        parts = super().encode(x)
        return parts | {"scale": parts["scale"][..., None]}


class EncodeTuple(Vectors):
    def encode(self, x):
        return tuple(super().encode(x).values())


class DividesByZero(Vectors):
    def encode(self, x):
        x = x.float()
        scale = x.abs().amax(-1) / 127
        return {"codes": (x / scale[..., None]).round().to(torch.int8), "scale": 1 / scale}

    def decode(self, parts):
        return parts["codes"].float() / parts["scale"][..., None]


class ZerosDecodeToNaN(Vectors):
    def decode(self, parts):
        return parts["codes"].float() * (parts["scale"].square() / parts["scale"])[..., None]


class Overflows(Vectors):
    def layout(self, dim, dtype):
        return {"codes": ((dim,), torch.int8), "scale": ((), torch.float16)}

    def encode(self, x):
        parts = super().encode(x)
        return parts | {"scale": parts["scale"].to(torch.float16)}

    def decode(self, parts):
        return super().decode({**parts, "scale": parts["scale"].float()})


class DecodesCut(Vectors):
    def decode(self, parts):
        return super().decode(parts)[..., :-1]


class DecodesIntegers(Vectors):
    def decode(self, parts):
        return super().decode(parts).int()


class NotInverse(Vectors):
    def decode(self, parts):
        return -super().decode(parts)


class WritesToInput(Vectors):
    def encode(self, x):
        x.mul_(0.999)
        return super().encode(x)


class WritesToParts(Vectors):
    def decode(self, parts):
        parts["scale"].add_(1e-3)
        return super().decode(parts)


class Random(Vectors):
    def encode(self, x):
        x = x.float()
        return super().encode(x + 1e-3 * torch.rand_like(x))


class Remembers(Vectors):
    calls: ClassVar[list[int]] = []

    def encode(self, x):
        self.calls.append(1)
        parts = super().encode(x)
        return parts | {"scale": parts["scale"] * (1 + len(self.calls) * 1e-4)}


class PeeksAtNeighbors(Vectors):
    """The scale is that of all tokens that happen to be encoded together."""

    def encode(self, x):
        x = x.float()
        scale = (x.abs().amax((-1, -2), keepdim=True)[..., 0] / 127).clamp(min=1e-30).expand(x.shape[:-1])
        codes = (x / scale[..., None]).round().clamp(-127, 127).to(torch.int8)
        return {"codes": codes, "scale": scale.contiguous()}


class Stepped(Vectors):
    def __init__(self, levels=127):
        self.levels = levels

    def encode(self, x):
        x = x.float()
        scale = (x.abs().amax(-1) / self.levels).clamp(min=1e-30)
        return {"codes": (x / scale[..., None]).round().to(torch.int8), "scale": scale}


class SameNameOtherBytes(KVCodec):
    """``levels`` decides the bytes, and the side's name doesn't say it."""

    name: ClassVar[str] = "zoo"
    levels: int = Field(default=64, ge=2, le=127)

    def keys(self):
        return Stepped(self.levels)


ZOO = [
    ("a built-in codec's name", codec_of(BuiltinName), "a side of it is called 'int8'"),
    ("a kernel's name", codec_of(KernelName), "is called 'hadamard4c'"),
    ("a side without a name", codec_of(NoName), "its name is ''"),
    ("hadamard is text", codec_of(HadamardText), "hadamard is 'no'"),
    ("keys() gives no codec", codec_of(dict), r"keys\(\) returned a dict"),
    ("a layout that is a list", codec_of(LayoutList), r"layout\(\) returned \["),
    ("a layout without shapes", codec_of(LayoutBare), r"layout\(\) returned \{"),
    ("a layout that fails at other dimensions", codec_of(LayoutCrashes), "fails at a head dimension of 128"),
    ("no dimension is taken", codec_of(LayoutRefusesAll), "refuses every head dimension"),
    ("a part is missing", codec_of(PartMissing), r"encode\(\) of \[2, 64, 64\] returned codes int8"),
    ("a part too many", codec_of(PartTooMany), "returned codes .* peak float32"),
    ("another dtype than the layout's", codec_of(OtherDtype), "scale float64"),
    ("another shape than the layout's", codec_of(OtherShape), r"scale float32 \[2, 64, 1\]"),
    ("encode returns a tuple", codec_of(EncodeTuple), "returned a tuple"),
    ("division by zero", codec_of(DividesByZero), "aren't finite"),
    ("unwritten slots decode to NaN", codec_of(ZerosDecodeToNaN), r"decode\(\) of zeros"),
    ("a scale that overflows", codec_of(Overflows), "a scale that isn't finite"),
    ("decode loses a number", codec_of(DecodesCut), r"decode\(\) returned torch.float32 \[2, 64, 63\]"),
    ("decode gives integers", codec_of(DecodesIntegers), r"decode\(\) returned torch.int32"),
    ("decode isn't the inverse", codec_of(NotInverse), "zeros would be closer"),
    ("encode writes to its input", codec_of(WritesToInput), r"encode\(\) writes to x"),
    ("decode writes to the parts", codec_of(WritesToParts), r"decode\(\) writes to scale"),
    ("chance", codec_of(Random), "global random generator"),
    ("memory of earlier calls", codec_of(Remembers), "another result the second time"),
    ("tokens share a scale in secret", codec_of(PeeksAtNeighbors), "a token's codes depend on the others"),
    ("an option that no name says", SameNameOtherBytes, "under the same name 'zoo'"),
    ("no codec at all", Vectors, "is no KV codec"),
    ("a class without a name", codec_of(Vectors, name=""), "has no name"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("fault", "kind", "words"), ZOO, ids=[row[0] for row in ZOO])
def test_a_broken_codec_is_caught(fault, kind, words):
    with pytest.raises(PluginError, match=words):
        check_codec(kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(registry("kv_codecs")))
def test_registered_codecs(name):
    check_codec(registry("kv_codecs").get(name))
