"""The layers that all dense families share. Each is built from :class:`Weights` by its full name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.errors import SourceError
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Linear, Weights
from quantkit.models.rope_frequencies import inverse_frequencies
from quantkit.ops.activation import silu_mul
from quantkit.ops.attention import Visibility, attention
from quantkit.ops.norm import rms_norm
from quantkit.ops.rope import rotate, tables

if TYPE_CHECKING:
    from quantkit.models.decoder import KVCacheProtocol


class Step:
    """What all layers of one forward pass share: rotation tables and who sees whom.

    Args:
        config: the model's.
        positions: int64 ``[B, T]``, −1: padding.
        dtype: of the hidden states.
    """

    def __init__(self, config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> None:
        self.positions = positions
        inverse = inverse_frequencies(config.rope, config.head_dim, positions.device)
        self.cos, self.sin = tables(positions, inverse, config.rope.attention_factor, dtype)
        self._seen: dict[int | None, Visibility] = {}

    def seen(self, window: int | None) -> Visibility:
        """Who sees whom among this step's own positions."""
        if window not in self._seen:
            self._seen[window] = Visibility(self.positions, self.positions, window)
        return self._seen[window]


class RMSNorm:
    """Holds the weight of one normalization; see :func:`quantkit.ops.norm.rms_norm`."""

    __slots__ = ("_eps", "weight")

    def __init__(self, name: str, size: int, eps: float, weights: Weights) -> None:
        self.weight = weights.tensor(f"{name}.weight")
        self._eps = eps
        check_shape(f"{name}.weight", self.weight, (size,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` → the same shape and dtype."""
        return rms_norm(x, self.weight, self._eps)


class Attention:
    """Grouped-query attention with rotary positions; optional biases, per-head norms and a window."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        name = f"model.layers.{index}.self_attn"
        self._config, self._index = config, index
        self._dim, self._window = config.head_dim, config.sliding_windows[index]
        hidden, dim = config.hidden_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        self.q_proj = linear(weights, f"{name}.q_proj", (q, hidden), config.qkv_bias)
        self.k_proj = linear(weights, f"{name}.k_proj", (kv, hidden), config.qkv_bias)
        self.v_proj = linear(weights, f"{name}.v_proj", (kv, hidden), config.qkv_bias)
        self.o_proj = linear(weights, f"{name}.o_proj", (hidden, q), config.o_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(f"{name}.q_norm", dim, config.rms_norm_eps, weights)
            self.k_norm = RMSNorm(f"{name}.k_norm", dim, config.rms_norm_eps, weights)

    def __call__(self, x: torch.Tensor, step: Step, cache: KVCacheProtocol | None) -> torch.Tensor:
        """``x [B, T, hidden]`` → ``[B, T, hidden]``; keys and values of this step go into ``cache``."""
        batch, length, _ = x.shape
        q, k, v = (proj(x).view(batch, length, -1, self._dim)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            out = cache.attend(self._index, q, k, v, step, self._window)
        else:
            q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
            out = attention(q, k, v, step.seen(self._window))
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))

    def linears(self) -> list[Linear]:
        """In the order of the model's slots."""
        return [self.q_proj, self.k_proj, self.v_proj, self.o_proj]


class MLP:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        name = f"model.layers.{index}.mlp"
        wide, narrow = (config.intermediate_size, config.hidden_size), (config.hidden_size,
                                                                        config.intermediate_size)
        self.gate_proj = linear(weights, f"{name}.gate_proj", wide, config.mlp_bias)
        self.up_proj = linear(weights, f"{name}.up_proj", wide, config.mlp_bias)
        self.down_proj = linear(weights, f"{name}.down_proj", narrow, config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, hidden]`` → ``[B, T, hidden]``."""
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))

    def linears(self) -> list[Linear]:
        """In the order of the model's slots."""
        return [self.gate_proj, self.up_proj, self.down_proj]


def linear(weights: Weights, name: str, shape: tuple[int, int], bias: bool) -> Linear:
    """The Linear ``name``, its shape checked against the config's. Raises SourceError."""
    made = weights.linear(name, bias)
    check_shape(f"{name}.weight", made, shape)
    if made.bias is not None:
        check_shape(f"{name}.bias", made.bias, shape[:1])
    return made


def check_shape(name: str, tensor: torch.Tensor | Linear, expected: tuple[int, ...]) -> None:
    """Raises SourceError when a stored tensor isn't what the config announces."""
    if tuple(tensor.shape) != expected:
        raise SourceError(f"tensor {name} has shape {list(tensor.shape)}, config.json says {list(expected)}",
                          why="config.json and the weights don't belong together",
                          next="get both from the same place again")
