"""Pages of codes as their codecs write and read them; and, for codecs without a kernel, decoded as well.

Decoding a whole cache in each step takes far longer than attention. So a page may keep what it decodes to
beside its codes: it is decoded once, when it is written, and moves with its codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.kv.base import PAGE, KVCodecs
from quantkit.kv.kernel_names import is_ours
from quantkit.kv.page_pool import PagePool

DECODED = {"k": "k.decoded", "v": "v.decoded"}
"""Names of the parts that hold a page's keys and values decoded."""


class CodedPages:
    """One layer's pages of codes.

    Args:
        pool: the pages.
        codecs: of keys and values.
        dim: head dimension.
    """

    def __init__(self, pool: PagePool, codecs: KVCodecs, dim: int) -> None:
        self._pool, self._sides, self._dim = pool, {"k": codecs.keys, "v": codecs.values}, dim
        self._alike = codecs.keys.name == codecs.values.name  # which says everything about the bytes
        self._wide = not (is_ours(codecs.keys) and is_ours(codecs.values))
        self._names = {side: [name for name in pool.parts if name.startswith(f"{side}.")]
                       for side in self._sides}

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """What pages hold of ``k, v [..., n, D]``, by name: codes, and what they decode to where that is
        kept."""
        if self._alike:  # one call for both: a token's few numbers cost less than the calls
            both = self._parts("k", torch.stack((k, v)))
            return {f"{side}.{name}": part[i] for name, part in both.items()
                    for i, side in enumerate(self._sides)}
        return {f"{side}.{name}": part for side, x in (("k", k), ("v", v))
                for name, part in self._parts(side, x).items()}

    def _parts(self, side: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a side's codec stores of ``x``, and ``decoded`` where that is kept."""
        parts = dict(self._sides[side].encode(x))
        return parts | {"decoded": self._sides[side].decode(parts)} if self.keeps_decoded else parts

    def read(self, side: str, table: torch.Tensor) -> torch.Tensor:
        """Pages int64 ``[..., n]`` of one side (``k`` or ``v``) as vectors: ``[..., n, PAGE, D]``."""
        if self.keeps_decoded:
            return self._pool.read(DECODED[side], table)
        return self.decode(side, table)

    def decode(self, side: str, table: torch.Tensor) -> torch.Tensor:
        """The same from codes in any case; float32, as decoded pages are, if a codec is a plugin's."""
        if self._wide and not table.numel():
            return torch.zeros(*table.shape, PAGE, self._dim, device=table.device)
        vectors = self._sides[side].decode({name.removeprefix(f"{side}."): self._pool.read(name, table)
                                            for name in self._names[side]})
        return vectors.float() if self._wide else vectors

    def stored_finite(self, side: str, table: torch.Tensor) -> bool:
        """Whether all that pages store in floating point is finite."""
        parts = (self._pool.read(name, table) for name in self._names[side])
        return all(bool(torch.isfinite(part).all()) for part in parts if part.dtype.is_floating_point)

    # -- decoded pages

    @property
    def keeps_decoded(self) -> bool:
        """Whether each page is also there as float32 vectors."""
        return DECODED["k"] in self._pool.parts

    @property
    def decoded_bytes(self) -> int:
        """Bytes of float32 vectors of all pages that exist."""
        return 2 * 4 * self._pool.total * PAGE * self._dim

    def decoded(self, side: str) -> torch.Tensor:
        """Decoded pages float32 ``[pages, PAGE, D]``. Raises KeyError if they aren't kept."""
        return self._pool.parts[DECODED[side]]

    def keep_decoded(self) -> None:
        """From now on keep each page decoded too. Those that belong to somebody are decoded now."""
        self._pool.derive(dict.fromkeys(DECODED.values(), ((self._dim,), torch.float32)))
        pages = torch.tensor(self._pool.taken(), dtype=torch.int64)
        for side in DECODED:
            self.decoded(side)[pages] = self.decode(side, pages).float()

    def forget_decoded(self) -> None:
        """Keep codes alone."""
        self._pool.forget_derived()

    def replace(self, slots: Sequence[int], heads: int, vectors: dict[str, torch.Tensor]) -> None:
        """Encode tokens whose vectors a kernel has left in decoded pages.

        Args:
            slots: of the tokens, by head, then token.
            heads: KV heads.
            vectors: by side, decoded pages float32 ``[pages, PAGE, D]``; only kept ones are decoded into.
        """
        where = torch.tensor(slots, dtype=torch.int64)
        k, v = (vectors[side].view(-1, self._dim).index_select(0, where).view(heads, -1, self._dim)
                for side in DECODED)
        self._pool.write(where, {name: part.flatten(0, 1) for name, part in self.encode(k, v).items()})
