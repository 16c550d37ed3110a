"""A model's operations on a GPU, over rows of tokens of any sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from quantkit.kv.cache import KVCache
from quantkit.kv.gpu import pages_of
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM, DecoderLayer
from quantkit.models.layers import MLP, RMSNorm
from quantkit.ops.hadamard import hadamard_factors
from quantkit.ops.linear_weight import LinearWeight, embed
from quantkit.ops.rows import softcapped
from quantkit.ops.stored_weight import StoredWeight
from quantkit.runtime.gpu.experts import ExpertLayer
from quantkit.runtime.gpu.linears import FusedLinear, device_weight, gate_of
from quantkit.runtime.gpu.prompts import PromptProducts
from quantkit.runtime.program_model import rope_tables

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import LayerPages, SequenceTables, StepTokens
    from quantkit_kernels.triton.levels import QuantizedActivations

ANGLES = 4096
"""Positions whose rotation is worked out at once, at least."""


class _Layer:
    """One layer's weights on the device."""

    def __init__(self, layer: DecoderLayer, config: ModelConfig, dtype: torch.dtype,
                 device: torch.device) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = FusedLinear(attention.inputs, dtype, device)
        self.o = FusedLinear([attention.o_proj], dtype, device)
        self.sinks = None if attention.sinks is None else attention.sinks.to(device)
        self.sink_scores = None if self.sinks is None else (self.sinks.double() * math.log2(math.e)).float()
        self.products = [self.qkv, self.o]
        self.experts = None
        if isinstance(mlp, MLP):
            self.gate_up = FusedLinear(mlp.inputs, dtype, device, gate_of(config))
            self.down = FusedLinear([mlp.down_proj], dtype, device)
            self.products += [self.gate_up, self.down]
        else:
            self.experts = ExpertLayer(mlp, config, dtype, device)
        self.norms = {name: norm.weight.to(device) for name, norm in (
            ("before_attention", layer.before_attention), ("q", attention.q_norm), ("k", attention.k_norm),
            ("after_attention", layer.after_attention), ("before_mlp", layer.before_mlp),
            ("after_mlp", layer.after_mlp)) if isinstance(norm, RMSNorm)}

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.products) + (
            0 if self.experts is None else self.experts.nbytes)

    @property
    def step_bytes(self) -> int:
        return sum(product.nbytes for product in self.products) + (
            0 if self.experts is None else self.experts.step_bytes)


class GpuProgram:
    """A model's weights on a device, and what is done with them.

    Args:
        model: its weights anywhere; they are let go of one by one.
        done: called when a layer's weights are on the device.

    Attributes:
        device, dtype: where it runs; of activations and logits.
        vocab: numbers of a token's logits.
        group: query heads that share a key head.
        step_bytes: bytes of weights that a token's decode step reads.
        weight_bytes: bytes of all weights but norms and an embedding that isn't the head.
        prompts: multiplies rows of prompts by the layers' weights.
        moves: how often the tables of angles came to lie elsewhere.
    """

    def __init__(self, model: CausalLM, device: torch.device, done: Callable[[], None]) -> None:
        config = self._config = model.config
        self.dtype = model.dtype
        self.device = device
        self._eps = config.rms_norm_eps
        self.vocab = config.vocab_size
        self.group = config.num_heads // config.num_kv_heads
        self._layers: list[_Layer] = []
        for layer in model.layers:
            self._layers.append(_Layer(layer, config, model.dtype, device))
            _let_go(layer, model.dtype, device)
            done()
        self._norm = model.norm.weight.to(device)
        self._head = FusedLinear([model.head], model.dtype, device)
        self._table = None if config.tie_word_embeddings else _moved(model.embedding, device)
        model.head.weight = device_weight(model.head, model.dtype, device)
        model.embedding = model.head.weight if self._table is None else self._table
        done()
        self.step_bytes = self._head.nbytes + sum(block.step_bytes for block in self._layers)
        self.weight_bytes = self._head.nbytes + sum(block.nbytes for block in self._layers)
        largest = max(product.numbers for block in self._layers for product in (
            *block.products, *([] if block.experts is None else block.experts.shared)))
        self.prompts = PromptProducts(largest, model.dtype, device)
        signs, mix = hadamard_factors(config.head_dim)
        self._hadamard = signs.to(device), mix.to(device)
        self._cos_sin: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._angles_now = self.moves = 0

    def head_alone(self) -> GpuProgram:
        """What :meth:`logits` needs of it."""
        alone = copy.copy(self)
        alone._layers, alone._table = [], None
        return alone

    def pages(self, cache: KVCache) -> list[LayerPages]:
        """The pages of all layers, where they lie now."""
        return [pages_of(layer.store, cache.codecs, self.dtype) for layer in cache.layers]

    def make_angles(self, longest: int) -> None:
        """Make the cosines and sines of at least ``longest`` positions."""
        if longest > self._angles_now:
            size = max(ANGLES, 2 * self._angles_now, longest)
            self._cos_sin = list(rope_tables(self._config, size, self.device))
            self._angles_now = size
            self.moves += 1

    def run(self, ids: torch.Tensor, step: StepTokens, tables: SequenceTables, pages: Sequence[LayerPages],
            cache: KVCache, tiles: torch.Tensor | None = None, queries: list[torch.Tensor] | None = None,
            prompts: PromptProducts | None = None,
            taps: Sequence[tuple[int, torch.Tensor]] = ()) -> torch.Tensor:
        """Take tokens through all layers; their keys and values are in the pages then.

        Args:
            ids: token ids, int64 ``[N]``.
            step: says whose they are.
            tables, pages: of all sequences.
            cache: says how a query looks at them.
            tiles: tiles of a prompt's tokens, see
                :func:`quantkit_kernels.triton.prefill_attention.prefill_attention`; ``None``: a token of
                each sequence.
            queries: gets each layer's queries ``[N, H, D]``, rotated.
            prompts: multiplies them, if they are a prompt's; see :attr:`prompts`.
            taps: layers, and where their inputs ``[N, hidden]`` are copied to; the number of layers stands
                for what the last one leaves.

        Returns:
            ``[N, hidden]``.
        """
        x = self.embed(ids)
        for index, layer in enumerate(self._layers):
            _hand_out(x, index, taps)
            x = self._attend(index, layer, x, step, tables, pages[index], cache, tiles, queries, prompts)
            x = self._mlp(layer, x, step, prompts)
        _hand_out(x, len(self._layers), taps)
        return x

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The last layer's ``[n, hidden]`` → ``[n, vocab]``, written to ``out``: final norm and head."""
        return self.head(self._normed_for(self._head, x, self._norm), out)

    def head(self, x: torch.Tensor | QuantizedActivations, out: torch.Tensor | None = None) -> torch.Tensor:
        """What is behind the final norm → ``[n, vocab]``, written to ``out``."""
        logits = self._head(x, out=out)
        if (cap := self._config.logit_softcap) is None:
            return logits
        return logits.copy_(softcapped(logits, cap))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = (self._head.look_up(ids) if self._table is None
             else embed(ids, self._table, self.dtype))
        if self._config.embedding_scale == 1.0:
            return x
        return x * torch.tensor(self._config.embedding_scale, dtype=x.dtype).item()

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's ``[n, hidden]`` behind the final norm."""
        return self._normed(x, self._norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from quantkit_kernels.triton.rms_norm import rms_norm

        return rms_norm(x, weight, self._eps)[0]

    def _normed_for(self, product: FusedLinear, x: torch.Tensor,
                    weight: torch.Tensor) -> torch.Tensor | QuantizedActivations:
        """Rounded on the way, to 8 bits or in groups, if that is what they multiply."""
        from quantkit_kernels.triton.rms_norm import rms_norm_groups, rms_norm_levels

        if product.inputs is not None:
            return rms_norm_groups(x, weight, self._eps, product.inputs)
        if product.takes is None:
            return self._normed(x, weight)
        return rms_norm_levels(x, weight, self._eps, product.takes)[0]

    def _attend(self, index: int, layer: _Layer, x: torch.Tensor, step: StepTokens, tables: SequenceTables,
                pages: LayerPages, cache: KVCache, tiles: torch.Tensor | None,
                queries: list[torch.Tensor] | None, prompts: PromptProducts | None) -> torch.Tensor:
        from quantkit_kernels.triton.close_pages import close_pages
        from quantkit_kernels.triton.decode_attention import decode_attention
        from quantkit_kernels.triton.prefill_attention import prefill_attention
        from quantkit_kernels.triton.rope_store import rope_store

        config, norms = self._config, layer.norms
        qkv = layer.qkv(self._normed_for(layer.qkv, x, norms["before_attention"]), prompts=prompts)
        cos, sin = self._cos_sin[index]
        q = rope_store(qkv, cos, sin, pages, tables, step, index, heads=config.num_heads,
                       kv_heads=config.num_kv_heads, dim=config.head_dim, q_norm=norms.get("q"),
                       k_norm=norms.get("k"), eps=self._eps, rotation=self._hadamard)
        if queries is not None:
            queries.append(q)
            cache.layers[index].scores.sinks = layer.sinks
        limit, sinks = cache.layers[index].policy.visible or (None, 0)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        options: dict[str, Any] = {"scale": scale, "window": config.sliding_windows[index], "limit": limit,
                                   "sinks": sinks, "softcap": config.attention_softcap,
                                   "sink_scores": layer.sink_scores}
        if pages.has_residual:
            close_pages(pages, tables, step, index)
        out = decode_attention(q, pages, tables, step, index, **options) if tiles is None else (
            prefill_attention(q, pages, tables, step, index, tiles, **options))
        if pages.v.coding.kind == "hadamard":
            from quantkit_kernels.triton.hadamard import apply_hadamard

            out = apply_hadamard(out.view(-1, config.head_dim), *self._hadamard, back=True).view(out.shape)
        mixed = out.view(out.shape[0], -1)
        if (weight := norms.get("after_attention")) is not None:
            return x + self._normed(layer.o(mixed, prompts=prompts), weight)
        return layer.o(mixed, residual=x, prompts=prompts)

    def _mlp(self, layer: _Layer, x: torch.Tensor, step: StepTokens,
             prompts: PromptProducts | None) -> torch.Tensor:
        if layer.experts is not None:
            tokens = self._normed(x, layer.norms["before_mlp"])
            if (weight := layer.norms.get("after_mlp")) is not None:
                return x + self._normed(layer.experts(tokens, step.rows, None, prompts), weight)
            return layer.experts(tokens, step.rows, x, prompts)
        normed = self._normed_for(layer.gate_up, x, layer.norms["before_mlp"])
        gated = layer.gate_up(normed, prompts=prompts)
        if (weight := layer.norms.get("after_mlp")) is not None:
            return x + self._normed(layer.down(gated, prompts=prompts), weight)
        return layer.down(gated, residual=x, prompts=prompts)


def _hand_out(x: torch.Tensor, layer: int, taps: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Copy a layer's inputs to where they are asked for, which may be several places."""
    for tapped, out in taps:
        if tapped == layer:
            out.copy_(x)


def _let_go(layer: DecoderLayer, dtype: torch.dtype, device: torch.device) -> None:
    """Its weights are on the device; what is left of a Linear is its shape and who multiplies it."""
    for linear in layer.linears().values():
        linear.weight = device_weight(linear, dtype, device)


def _moved(table: LinearWeight, device: torch.device) -> StoredWeight:
    assert isinstance(table, StoredWeight)
    return table.to(device)
