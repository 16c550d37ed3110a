"""A model's operations on a GPU, over rows of tokens of any sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Hidden(NamedTuple):
    """Tokens' hidden states ``[N, hidden]``: x, or with ``added`` what ``x + norm(added) · weight`` will be,
    which the next norm's kernel computes."""

    x: torch.Tensor
    added: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    @property
    def terms(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a norm's kernel begins with, and what it adds to that."""
        return (self.x, None) if self.added is None else (self.added, self.x)


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
        state = _Hidden(self.embed(ids))
        for index, layer in enumerate(self._layers):
            self._hand_out(state, index, taps)
            state = self._attend(index, layer, state, step, tables, pages[index], cache, tiles, queries,
                                 prompts)
            state = self._mlp(layer, state, step, prompts)
        self._hand_out(state, len(self._layers), taps)
        return self._summed(state)

    def _hand_out(self, state: _Hidden, layer: int, taps: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy a layer's inputs to where they are asked for, which may be several places."""
        for tapped, out in taps:
            if tapped == layer:
                out.copy_(self._summed(state))

    def _summed(self, state: _Hidden) -> torch.Tensor:
        if state.added is None or state.weight is None:
            return state.x
        return state.x + self._normed(_Hidden(state.added), state.weight)[0]

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The last layer's ``[n, hidden]`` → ``[n, vocab]``, written to ``out``: final norm and head."""
        return self.head(self._normed_for(self._head, _Hidden(x), self._norm)[0], out)

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
        return self._normed(_Hidden(x), self._norm)[0]

    def _normed(self, state: _Hidden, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of hidden states; and these."""
        from quantkit_kernels.triton.rms_norm import rms_norm

        x, residual = state.terms
        return rms_norm(x, weight, self._eps, residual, state.weight)

    def _normed_for(self, product: FusedLinear, state: _Hidden, weight: torch.Tensor
                    ) -> tuple[torch.Tensor | QuantizedActivations, torch.Tensor]:
        """Rounded on the way, to 8 bits or in groups, if that is what they multiply."""
        from quantkit_kernels.triton.rms_norm import rms_norm_groups, rms_norm_levels

        x, residual = state.terms
        if product.inputs is not None:
            return rms_norm_groups(x, weight, self._eps, product.inputs, residual, state.weight)
        if product.takes is None:
            return self._normed(state, weight)
        return rms_norm_levels(x, weight, self._eps, product.takes, residual, state.weight)

    def _attend(self, index: int, layer: _Layer, state: _Hidden, step: StepTokens, tables: SequenceTables,
                pages: LayerPages, cache: KVCache, tiles: torch.Tensor | None,
                queries: list[torch.Tensor] | None, prompts: PromptProducts | None) -> _Hidden:
        from quantkit_kernels.triton.close_pages import close_pages
        from quantkit_kernels.triton.decode_attention import decode_attention
        from quantkit_kernels.triton.prefill_attention import prefill_attention
        from quantkit_kernels.triton.rope_store import rope_store

        config, norms = self._config, layer.norms
        normed, x = self._normed_for(layer.qkv, state, norms["before_attention"])
        qkv = layer.qkv(normed, prompts=prompts)
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
            return _Hidden(x, layer.o(mixed, prompts=prompts), weight)
        return _Hidden(layer.o(mixed, residual=x, prompts=prompts))

    def _mlp(self, layer: _Layer, state: _Hidden, step: StepTokens, prompts: PromptProducts | None
             ) -> _Hidden:
        norms = layer.norms
        weight = norms.get("after_mlp")
        if layer.experts is not None:
            tokens, x = self._normed(state, norms["before_mlp"])
            if weight is not None:
                return _Hidden(x, layer.experts(tokens, step.rows, None, prompts), weight)
            return _Hidden(layer.experts(tokens, step.rows, x, prompts))
        normed, x = self._normed_for(layer.gate_up, state, norms["before_mlp"])
        gated = layer.gate_up(normed, prompts=prompts)
        if weight is not None:
            return _Hidden(x, layer.down(gated, prompts=prompts), weight)
        return _Hidden(layer.down(gated, residual=x, prompts=prompts))


def _let_go(layer: DecoderLayer, dtype: torch.dtype, device: torch.device) -> None:
    """Its weights are on the device; what is left of a Linear is its shape and who multiplies it."""
    for linear in layer.linears().values():
        linear.weight = device_weight(linear, dtype, device)


def _moved(table: LinearWeight, device: torch.device) -> StoredWeight:
    assert isinstance(table, StoredWeight)
    return table.to(device)
