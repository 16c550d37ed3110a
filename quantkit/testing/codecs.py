"""The contract of KV codecs: ``quantkit.kv.base``, ``KVCodec`` and ``SideCodec``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError

from quantkit.kv.base import MAX_RESIDUAL, PAGE, KVCodec, KVCodecs, SideCodec, is_ours
from quantkit.kv.checked import check_codecs
from quantkit.kv.spec import KVSpec
from quantkit.support.errors import UsageError
from quantkit.testing.contract import Contract, named_class
from quantkit.testing.purity import pure, registered, same
from quantkit.testing.running import check_setting

DIMS = (64, 128, 96, 32)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALLEST = 2.0**-100
"""An error below this is none."""


def check_codec(kind: type[KVCodec], **options: Any) -> None:
    """Encode and decode ordinary and awkward vectors, and run a tiny model over such a cache.

    For each side, head dimension and dtype that the codec takes: layouts and dtypes, finite results, no
    argument written to, the same result twice, tokens that don't depend on each other unless they share a
    page, and vectors closer than zeros. With options that change what is stored, a side's name must change
    too. Then the model's logits must be the same alone and beside another sequence.

    Args:
        kind: the class that is registered.
        options: of the codec; by default its own.

    Raises:
        PluginError: a promise is broken; the side, the dimension and the vectors are named.
    """
    name = named_class(kind, KVCodec, "KV codec")
    contract = Contract(f"KV codec {name!r}", "quantkit.kv.base")
    codec = _made(kind, options, contract)
    for field in ("residual_length", "sinks"):
        value = getattr(codec, field)
        contract.must(type(value) is int and 0 <= value <= MAX_RESIDUAL,
                      f"{field} is {value!r}; it must be a number of tokens")
    sides = {side: contract.call(f"{side}()", getattr(codec, side)) for side in ("keys", "values")}
    for side, made in sides.items():
        contract.must(isinstance(made, SideCodec), f"{side}() returned a {type(made).__name__}",
                      "give it name, hadamard, layout, shared, encode and decode, as SideCodec has them")
    with registered("kv_codecs", name, kind):
        dims = [dim for dim in DIMS if _takes(codec, dim, contract)]
        contract.must(bool(dims), f"it refuses every head dimension of {', '.join(map(str, DIMS))}")
        for dim in dims:
            for dtype in DTYPES:
                check_codecs(KVCodecs(sides["keys"], sides["values"]), KVSpec(codec=name), dim, dtype)
                for side, made in sides.items():
                    here = contract.at(f"{side} [{dim}] {dtype}".replace("torch.", ""))
                    _check_vectors(made, dim, dtype, here)
        _check_names(kind, codec, dims[0], contract)
        check_setting(KVSpec(codec=name, codec_options=options), dims[0], contract)


def _made(kind: type[KVCodec], options: Mapping[str, Any], contract: Contract) -> KVCodec:
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise contract.error(f"it can't be made with {dict(options)}: {'.'.join(map(str, first['loc']))}: "
                             f"{first['msg']}") from None


def _takes(codec: KVCodec, dim: int, contract: Contract) -> bool:
    for side in (codec.keys(), codec.values()):
        try:
            side.layout(dim, torch.bfloat16)
        except UsageError:
            return False
        except Exception as error:
            raise contract.error(f"it fails at a head dimension of {dim}: {type(error).__name__}: {error}",
                                 "raise UsageError in layout() for what it doesn't support") from error
    return True


def vectors(dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Ordinary and awkward vectors ``[2, 64, dim]``, all finite in ``dtype`` and at most 2^126."""
    normal = torch.randn(2, PAGE, dim, generator=torch.Generator().manual_seed(0))
    outlier, channel = normal.clone(), normal.clone()
    outlier[0, 3, 5] = 1e4
    channel[..., 7] += 30
    largest = torch.full_like(normal, min(torch.finfo(dtype).max, 2.0**126))
    largest[..., ::2] *= -1
    made = {"normal": normal, "one outlier": outlier, "a large channel": channel,
            "zeros": torch.zeros_like(normal), "equal": torch.full_like(normal, 0.3),
            "denormal": normal * torch.finfo(dtype).tiny * 0.1, "the largest": largest,
            "one large token": torch.cat((normal[:, :1] * 1e3, normal[:, 1:]), 1)}
    return {name: x.to(dtype) for name, x in made.items()}


def _check_vectors(codec: SideCodec, dim: int, dtype: torch.dtype, contract: Contract) -> None:
    shared = bool(codec.shared(dim, dtype))
    encoded: dict[str, Mapping[str, torch.Tensor]] = {}
    for name, x in vectors(dim, dtype).items():
        here = contract.at(f"vectors {name!r}")
        parts = encoded[name] = pure(here, "encode()", partial(codec.encode, x), {"x": x})
        back = pure(here, "decode()", partial(codec.decode, parts), parts)
        for part_name, part in parts.items():
            here.must(not part.dtype.is_floating_point or bool(torch.isfinite(part).all()),
                      f"encode() gives a {part_name} that isn't finite")
        here.must(bool(torch.isfinite(back).all()), "decode() gives values that aren't finite")
        wide = x.double()
        error, size = (float(vectors.square().sum()) for vectors in (back.double() - wide, wide))
        here.must(error <= size * 1.0001 + x.numel() * SMALLEST**2,
                  "zeros would be closer than what is decoded: encode() and decode() aren't inverses")
        if not shared:
            _check_alone(codec, x, parts, here)
    for name, x in vectors(dim, dtype).items():  # nothing of other calls is left in the codec
        contract.at(f"vectors {name!r}").must(same(codec.encode(x), encoded[name]),
                                              "encode() depends on earlier calls")


def _check_alone(codec: SideCodec, x: torch.Tensor, parts: Mapping[str, torch.Tensor],
                 contract: Contract) -> None:
    """Without shared parts a token's codes are its own, whatever stands beside it."""
    for head, start, stop in ((0, 0, 1), (1, 3, 8), (0, PAGE - 1, PAGE)):
        alone = codec.encode(x[head, start:stop])
        contract.must(same({name: part[head, start:stop] for name, part in parts.items()}, alone),
                      "a token's codes depend on the others, which come in groups of any size",
                      "put what 64 tokens share into shared()")


def _check_names(kind: type[KVCodec], codec: KVCodec, dim: int, contract: Contract) -> None:
    """Options that change the bytes must change the name: kernels and programs are chosen by it."""
    for option, value, other in _variants(kind, codec):
        for side in ("keys", "values"):
            mine, its = getattr(codec, side)(), getattr(other, side)()
            if mine.name != its.name or is_ours(mine):
                continue
            x = vectors(dim, torch.float32)["normal"]
            contract.must(same(mine.encode(x), its.encode(x)),
                          f"with {option}={value} its {side} are stored in other bytes under the same name "
                          f"{mine.name!r}", "say everything that the bytes depend on in the side's name")


def _variants(kind: type[KVCodec], codec: KVCodec) -> Iterator[tuple[str, Any, KVCodec]]:
    """The codec with one option changed, where that is valid."""
    for option in kind.model_fields:
        value = getattr(codec, option)
        others: tuple[Any, ...] = (not value,) if isinstance(value, bool) else (
            value + 1, value - 1, value * 2) if isinstance(value, int | float) else ()
        for other in others:
            try:
                yield option, other, kind.model_validate({**codec.model_dump(), option: other})
            except (ValidationError, UsageError):
                continue
