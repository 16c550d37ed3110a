"""Other tools' layouts once more, in NumPy and from their descriptions: what our packing is compared with."""

from __future__ import annotations

import numpy as np


def words(levels: np.ndarray, bits: int) -> np.ndarray:
    """Levels ``[rows, n]`` → int32 ``[rows, n * bits / 32]``, a little-endian stream of bits a row."""
    stream = (levels.astype(np.int64)[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(len(levels), -1).astype(np.uint8), axis=1,
                       bitorder="little").view("<i4")


def gptq(levels: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int,
         version: int = 1) -> dict[str, np.ndarray]:
    """``levels [out, in]``, ``scale`` and ``zero`` ``[out, groups]``."""
    cols, groups = levels.shape[1], scale.shape[1]
    return {"qweight": np.ascontiguousarray(words(levels, bits).T),
            "qzeros": words(zero.T - (1 if version == 1 else 0), bits),
            "scales": np.ascontiguousarray(scale.T.astype(np.float16)),
            "g_idx": np.array([i // (cols // groups) for i in range(cols)], dtype=np.int32)}


def awq(levels: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> dict[str, np.ndarray]:
    """The same shapes; 4 bits."""

    def interleaved(rows: np.ndarray) -> np.ndarray:
        out = np.zeros((rows.shape[0], rows.shape[1] // 8), dtype=np.uint32)
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out |= rows[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return out.view(np.int32)

    return {"qweight": interleaved(levels.T), "qzeros": interleaved(zero.T),
            "scales": np.ascontiguousarray(scale.T.astype(np.float16))}


def dequantized(levels: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """float32 ``[out, in]``."""
    size = levels.shape[1] // scale.shape[1]
    repeated = np.repeat(scale.astype(np.float32), size, axis=1)
    return (levels.astype(np.float32) - np.repeat(zero.astype(np.float32), size, axis=1)) * repeated


def mlx(levels: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int,
        dtype: type = np.float16) -> dict[str, np.ndarray]:
    """``scale`` and ``minimum`` are ``[out, groups]``."""
    return {"weight": words(levels, bits).view("<u4"), "scales": scale.astype(dtype),
            "biases": minimum.astype(dtype)}
