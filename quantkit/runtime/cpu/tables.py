"""Page tables of a cache as the CPU program reads them."""

from __future__ import annotations

from quantkit.kv.store import PageStore


def page_addresses(store: PageStore) -> dict[str, int]:
    """The addresses of a layer's pages, by the name of a kernel's argument; 0: there are none.

    They are plain addresses: the memory belongs to the cache and ends with it.
    """
    from quantkit_kernels.cpu.kv_codecs import PARTS

    addresses = {name.replace(".", "_"): part.data_ptr() for name, part in store.pages.parts.items()}
    if store.residual is not None:
        residual = store.residual.parts
        addresses |= {f"{side}_residual": residual[f"{side}.values"].data_ptr() for side in "kv"}
        addresses["residual_positions"] = residual["positions"].data_ptr() if "positions" in residual else 0
    return {name: addresses.get(name, 0) for name in (
        "positions", "residual_positions", "k_residual", "v_residual",
        *(f"{side}_{part}" for side in "kv" for part in PARTS))}
