"""The layers that all families share. Each is built from :class:`Weights` by its full name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext
from quantkit.models.interfaces import KVCacheProtocol
from quantkit.models.linear import Linear, Weights
from quantkit.ops.attention import attention
from quantkit.ops.linear_weight import LinearWeight, embed
from quantkit.ops.rope import apply_rope
from quantkit.ops.rows import by_sequence, clamped_silu_mul, gelu_tanh_mul, rms_norm, silu_mul
from quantkit.support.errors import SourceError

ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class RMSNorm:
    """Holds the weight of one normalization; see :func:`quantkit.ops.rows.rms_norm`."""

    __slots__ = ("_eps", "weight")

    def __init__(self, name: str, size: int, config: ModelConfig, weights: Weights) -> None:
        self.weight = weights.tensor(f"{name}.weight")
        self._eps = config.rms_norm_eps
        check_shape(f"{name}.weight", self.weight, (size,))
        if config.offset_norms:
            self.weight = 1 + self.weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` → the same shape and dtype."""
        return rms_norm(x, self.weight, self._eps)


class Attention:
    """Grouped-query attention with rotary positions; optional biases, per-head norms and a window.

    Args:
        config, index, weights: as for a layer.
        size: the input's size, if it isn't the hidden size.

    Attributes:
        inputs: the Linears that see the layer's input: q, k and v, or all three as one.
        sizes: the sizes of q, k and v.
        sinks: float32 ``[heads]``, of a model with attention sinks.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights, size: int = 0) -> None:
        name = f"model.layers.{index}.self_attn"
        self._config, self._index = config, index
        self._dim, self._window = config.head_dim, config.sliding_windows[index]
        hidden, dim = config.hidden_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        self.sizes = (q, kv, kv)
        parts = {"qkv_proj": q + 2 * kv} if config.fused_projections else {
            "q_proj": q, "k_proj": kv, "v_proj": kv}
        self.inputs = [linear(weights, f"{name}.{part}", (rows, size or hidden), config.qkv_bias)
                       for part, rows in parts.items()]
        self.o_proj = linear(weights, f"{name}.o_proj", (hidden, q), config.o_bias)
        self.q_norm = self.k_norm = None
        self.sinks: torch.Tensor | None = None
        if config.attention_sinks:
            self.sinks = weights.tensor(f"{name}.sinks").float()
            check_shape(f"{name}.sinks", self.sinks, (config.num_heads,))
        if config.qk_norm:
            self.q_norm = RMSNorm(f"{name}.q_norm", dim, config, weights)
            self.k_norm = RMSNorm(f"{name}.k_norm", dim, config, weights)

    def __call__(self, x: torch.Tensor, context: ForwardContext,
                 cache: KVCacheProtocol | None) -> torch.Tensor:
        """``x [B, T, hidden]`` → ``[B, T, hidden]``; keys and values of this step go into ``cache``."""
        return self.o_proj(self.attend(x, context, cache))

    def attend(self, x: torch.Tensor, context: ForwardContext,
               cache: KVCacheProtocol | None) -> torch.Tensor:
        """What the output projection multiplies: ``x [B, T, hidden]`` → ``[B, T, heads · dim]``."""
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, -1, self._dim) for y in project(self.inputs, x, self.sizes))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None:
            out = cache.attend(self._index, q, k, v, context, self._window, self.sinks)
        else:
            cos, sin = context.rope_tables(self._window)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            out = attention(q, k, v, context.seen(self._window), self._config.attention_scale,
                            self._config.attention_softcap, self.sinks)
        return out.transpose(1, 2).reshape(batch, length, -1)

    def linears(self) -> list[Linear]:
        """The Linears, in the order of the model's slots."""
        return [*self.inputs, self.o_proj]


class MLP:
    """``down(silu(gate(x)) * up(x))``, or with another activation.

    Args:
        config: says which activation.
        inputs: full names of gate and up, or of one Linear that is both.
        down: its full name.
        size: the size of what the activation gives.
        bias: whether all have one.

    Attributes:
        inputs: the Linears that see the layer's input.
        sizes: the sizes of gate and up.
    """

    def __init__(self, config: ModelConfig, weights: Weights, inputs: Sequence[str], down: str, size: int,
                 bias: bool = False) -> None:
        self._activation = (partial(clamped_silu_mul, limit=config.activation_limit)
                            if config.activation == "clamped_silu" else ACTIVATIONS[config.activation])
        self.sizes = (size, size)
        self.inputs = [linear(weights, name, (2 * size // len(inputs), config.hidden_size), bias)
                       for name in inputs]
        self.down_proj = linear(weights, down, (config.hidden_size, size), bias)

    @classmethod
    def of_layer(cls, config: ModelConfig, index: int, weights: Weights) -> MLP:
        """The MLP of a layer without experts."""
        name = f"model.layers.{index}.mlp"
        parts = ("gate_up_proj",) if config.fused_projections else ("gate_proj", "up_proj")
        return cls(config, weights, [f"{name}.{part}" for part in parts], f"{name}.down_proj",
                   config.intermediate_size, config.mlp_bias)

    def __call__(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """``[..., hidden]`` → the same shape; ``rows``: see :class:`Linear`."""
        return self.down_proj(self.activate(x, rows), rows)

    def activate(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """What the down projection multiplies: ``[..., hidden]`` → ``[..., size]``."""
        gate, up = project(self.inputs, x, self.sizes, rows)
        return self._activation(gate, up)

    def linears(self) -> list[Linear]:
        """The Linears, in the order of the model's slots."""
        return [*self.inputs, self.down_proj]


def project(linears: Sequence[Linear], x: torch.Tensor, sizes: Sequence[int],
            rows: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """``x [..., in]`` through Linears that see the same input → ``[..., size]`` for each of ``sizes``."""
    if len(linears) == len(sizes):
        return [linear(x, rows) for linear in linears]
    (fused,) = linears
    return fused(x, rows).split(list(sizes), -1)


def embedded(config: ModelConfig, ids: torch.Tensor, table: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """int64 ``[...]`` → ``[..., hidden]`` in ``dtype``: what enters the first layer."""
    x = embed(ids, table, dtype)
    if config.embedding_scale == 1.0:
        return x
    return x * torch.tensor(config.embedding_scale, dtype=x.dtype, device=x.device)


def linear(weights: Weights, name: str, shape: tuple[int, int], bias: bool) -> Linear:
    """The Linear ``name``, its shape checked against the config's. Raises SourceError."""
    layer = weights.linear(name, bias)
    check_shape(f"{name}.weight", layer, shape)
    if layer.bias is not None:
        check_shape(f"{name}.bias", layer.bias, shape[:1])
    return layer


def check_shape(name: str, tensor: torch.Tensor | LinearWeight | Linear, expected: tuple[int, ...]) -> None:
    """Raises SourceError when a stored tensor isn't what the config announces."""
    if tuple(tensor.shape) != expected:
        raise SourceError(f"tensor {name} has shape {list(tensor.shape)}, config.json says {list(expected)}",
                          why="config.json and the weights don't belong together",
                          next="get both from the same place again")


def route(scores: torch.Tensor, chosen: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely experts of each token, https://arxiv.org/abs/2101.03961.

    Args:
        scores: ``[n, experts]`` of the router, any floating dtype.
        chosen: experts a token; of equals the first.
        normalized: their weights are made to sum to 1.

    Returns:
        int64 ``[n, chosen]`` and their weights, float32 ``[n, chosen]``: shares of a softmax over all.
    """
    shares = scores.float().softmax(-1)
    best, order = shares.sort(dim=-1, descending=True, stable=True)
    best = best[:, :chosen]
    if normalized:
        best = best / best.sum(-1, keepdim=True)
    return order[:, :chosen], best


def by_expert(chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each expert that a token chose, in rising order: its number, the tokens that chose it in rising
    order, and as which of their choices, both int64.

    Args:
        chosen: int64 ``[n, k]``, no number twice in a row.
    """
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    numbers, counts = flat[order].unique_consecutive(return_counts=True)
    for number, places in zip(numbers.tolist(), order.split(counts.tolist())):
        yield number, places // chosen.shape[1], places % chosen.shape[1]


class MixtureOfExperts:
    """The chosen experts' results, weighed by the router.

    What a token gets depends on no other token: each expert multiplies its tokens row by row, and their
    results are added in the experts' order.

    Attributes:
        router: ``[experts, hidden]``, perhaps with a bias, never quantized.
        experts: one by one.
        shared, shared_gate: an expert that every token gets, and what says how much of it; or ``None``.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        experts = config.experts
        assert experts is not None and experts.layers[index]
        self._chosen, self._normalized = experts.chosen, experts.normalized
        router, *gates = experts.routers(index)
        self.router = linear(weights, router, (experts.count, config.hidden_size), experts.router_bias)

        def expert(number: int | None, size: int) -> MLP:
            name = experts.expert_name(index, number)
            gate, up, down = (f"{name}.{part}" for part in experts.projections)
            return MLP(config, weights, (gate, up), down, size, config.mlp_bias)

        self.experts = [expert(number, experts.intermediate_size) for number in range(experts.count)]
        self.shared = self.shared_gate = None
        if gates:
            self.shared = expert(None, experts.shared_size)
            self.shared_gate = linear(weights, gates[0], (1, config.hidden_size), False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, hidden]`` → ``[B, T, hidden]``."""
        tokens = x.reshape(-1, x.shape[-1])
        routed = [route(scores.flatten(0, 1), self._chosen, self._normalized)
                  for scores in by_sequence(self.router(x))]
        chosen, shares = (torch.cat(parts) for parts in zip(*routed))
        out = torch.zeros_like(tokens, dtype=torch.float32)
        for number, rows, places in by_expert(chosen):
            result = self.experts[number](tokens[rows], rows)
            out.index_add_(0, rows, result.float() * shares[rows, places, None])
        if self.shared is not None and self.shared_gate is not None:
            share = self.shared_gate(x).float().sigmoid()
            out += (self.shared(x).float() * share).view_as(out)
        return out.to(x.dtype).view_as(x)

    def linears(self) -> list[Linear]:
        """The experts' Linears, in the order of the model's slots."""
        every = self.experts if self.shared is None else [*self.experts, self.shared]
        return [linear for expert in every for linear in expert.linears()]
