"""Our KV cache beneath transformers' attention.

transformers' own cache classes hand keys and values to an attention function. Ours stores them as codes, in
pages of which every head may hold another number, and so it comes with the attention that reads these,
registered under the name ``quantkit``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext
from quantkit.support.errors import QuantkitError

NAME = "quantkit"
"""Of our attention, as transformers' ``attn_implementation``."""
_MARK = "_quantkit_cache_layer"
"""The attribute by which attention knows the keys of a cache of ours."""


class ModulesCache(TransformersCache, ABC):
    """Steps of a KV cache of ours in a network of transformers.

    Each layer attends by our attention while it stores its keys here, and by its own otherwise.

    Args:
        model: the network, or a part of it that has its layers.
        kv_cache: the pages and who holds them, for as many layers.

    Attributes:
        kv_cache: the same.
        config: what the layers' attention is.
    """

    def __init__(self, model: PreTrainedModel, kv_cache: KVCache) -> None:
        self.kv_cache, self.config = kv_cache, kv_cache.config
        self._model_config = model.config.get_text_config()
        self._batch: Batch | None = None
        self._context: ForwardContext | None = None
        self._own: str | None = None
        self._checked: tuple[int | None, torch.Tensor | None] | None = None
        self._layer = 0
        super().__init__(layers=[_Layer(self, index) for index in range(self.config.num_layers)])

    @abstractmethod
    def next_batch(self, rows: int, tokens: int) -> Batch:
        """The sequences of the step that begins.

        Args:
            rows: sequences in it.
            tokens: tokens that each of them gets.
        """

    @abstractmethod
    def seen(self) -> int:
        """Tokens that each row has had."""

    def take(self, layer: int, keys: torch.Tensor) -> None:
        """Take note of a step's keys ``[B, Hkv, T, D]``: the layer's attention will be ours, this once."""
        if layer != self._layer or self._own is not None:
            self.reset()
            raise unsupported("this model, or going on after an error",
                              f"keys of layer {layer} came where those of layer {self._layer} were awaited")
        if layer == 0:
            self._batch = self.next_batch(keys.shape[0], keys.shape[2])
            self._context = _Unrotated(self.config, self._batch.next_positions(keys.shape[2]),
                                       self.kv_cache.dtype)
            self._checked = None
            self._batch.begin([keys.shape[2]] * keys.shape[0])
        self._own = self._model_config._attn_implementation
        self._model_config._attn_implementation = NAME
        setattr(keys, _MARK, (self, layer))

    @torch.no_grad()
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None, options: Mapping[str, Any]) -> torch.Tensor:
        """Store a layer's keys and values, rotated, and attend: ``[B, H, T, D]``."""
        self._restore()
        assert self._batch is not None and self._context is not None
        window, sinks = self.config.sliding_windows[layer], options.get("s_aux")
        self._layer = -1  # until the layer is whole
        self._check_shapes(k, v, options)
        self._check_mask(mask, window, q.shape[2])
        out = self._batch.attend(layer, q, k, v, self._context, window,
                                 None if sinks is None else sinks.detach().float())
        self._layer = layer + 1
        if self._layer == self.config.num_layers:
            self._batch.end()
            self._layer = 0
        return out

    def reset(self) -> None:
        """Forget a step that wasn't finished."""
        self._restore()
        self._batch, self._layer = None, 0

    @property
    def unfinished(self) -> bool:
        """Whether a step ended before all layers had stored their keys."""
        return self._layer != 0 or self._own is not None

    def _restore(self) -> None:
        if self._own is not None:
            self._model_config._attn_implementation, self._own = self._own, None

    def _check_shapes(self, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Raise QuantkitError for attention that isn't what the config says."""
        config = self.config
        expected = (k.shape[0], config.num_kv_heads, k.shape[2], config.head_dim)
        if k.shape != expected or v.shape != expected:
            raise unsupported("this model", f"a layer's keys are {list(k.shape)} and its values "
                                            f"{list(v.shape)}; both were to be {list(expected)}")
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        given = options.get("scaling")
        if (given is not None and abs(given - scale) > 1e-6 * scale) or (
                (options.get("softcap") or None) != config.attention_softcap):
            raise unsupported("this model", f"a layer scales its scores by {given} and caps them at "
                                            f"{options.get('softcap')}, another by {scale:.6g} and at "
                                            f"{config.attention_softcap}")

    def _check_mask(self, mask: torch.Tensor | None, window: int | None, tokens: int) -> None:
        """Raise QuantkitError for a mask that is another than that of causal attention in a window."""
        if mask is None or (self._checked is not None and self._checked[0] == window
                            and self._checked[1] is mask):
            return
        seen = mask if mask.dtype == torch.bool else mask == (1 if mask.dim() == 2 else 0)
        if mask.dim() == 2:
            right = bool(seen.all())
        else:
            keys = torch.arange(mask.shape[-1], device=mask.device)
            queries = keys[-tokens:, None]
            expected = (keys <= queries) if window is None else (keys <= queries) & (keys > queries - window)
            right = bool((seen == expected).all())
        if not right:
            raise unsupported("a padded batch, or another mask than a causal one",
                              "padding would be stored as if it were text")
        self._checked = window, mask


class BatchCache(ModulesCache):
    """One step of sequences of a cache that is somebody else's.

    Args:
        model: as for :class:`ModulesCache`.
        batch: the step, of one token count for all rows.
    """

    def __init__(self, model: PreTrainedModel, batch: Batch) -> None:
        super().__init__(model, batch.cache)
        self._given = batch

    def next_batch(self, rows: int, tokens: int) -> Batch:
        return self._given

    def seen(self) -> int:
        return self._given.starts[0]


class _Layer(CacheLayerMixin):
    """What transformers asks of a layer's cache."""

    is_compileable = False
    is_sliding = False
    is_initialized = True
    supports_early_init = False
    is_croppable = False

    def __init__(self, cache: ModulesCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: pages come with tokens."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same keys and values: our attention stores them."""
        self._cache.take(self._index, key_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._cache.seen()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.seen() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class _Unrotated(ForwardContext):
    """Queries and keys come rotated: no position turns them again."""

    def rope_tables(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos`` 1 and ``sin`` 0."""
        shape = (*self.positions.shape, self._config.rope_of(window).rotated(self._config.head_dim))
        cos = torch.ones(shape, dtype=self._dtype, device=self.positions.device)[:, None]
        return cos, torch.zeros_like(cos)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, None]:
    """Attention over a cache of ours, as transformers calls it: ``[B, T, H, D]``.

    Raises:
        QuantkitError: keys come from elsewhere: the model changes them behind its cache.
    """
    cache, layer = getattr(key, _MARK, (None, 0))
    if cache is None:
        raise unsupported("this model", "it changes keys behind its cache, or has no cache of ours")
    out: torch.Tensor = cache.attend(layer, query, key, value, attention_mask, options)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


def attention_config(sizes: ModelConfig, config: Any, modules: Iterable[Any] = ()) -> ModelConfig:
    """``sizes`` with what a KV cache needs to know of the attention of a family that isn't known here.

    Args:
        sizes: the model's other sizes.
        config: transformers' config of the whole model.
        modules: all of the network, of which layers' say how they scale their scores.

    Raises:
        QuantkitError: some layers keep something else than keys and values of one shape.
    """
    text = config.get_text_config(decoder=True)
    try:
        heads = getattr(text, "num_attention_heads", None)
        kv_heads = getattr(text, "num_key_value_heads", None)
        head_dim = getattr(text, "head_dim", None)
        window = getattr(text, "sliding_window", None)
    except RuntimeError:  # transformers doesn't tell one size of all layers where they differ
        raise unsupported(f"a {sizes.model_type} model", "its layers have heads of several sizes") from None
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * sizes.num_layers
    other = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if getattr(text, "kv_lora_rank", None) or other or type(heads) is not int or (
            len(kinds) != sizes.num_layers):
        raise unsupported(f"a {sizes.model_type} model", "its layers keep something else than keys and values"
                          + (f": one is of kind {other}" if other else ""))
    inside = [vars(module) for module in modules if hasattr(module, "layer_idx")]
    scales = {values["scaling"] for values in inside if type(values.get("scaling")) is float}
    caps = {values.get("attn_logit_softcapping") for values in inside} - {None}
    return replace(
        sizes, num_heads=heads, num_kv_heads=kv_heads or heads,
        head_dim=head_dim or sizes.hidden_size // heads,
        attention_scale=scales.pop() if len(scales) == 1 else None,
        attention_softcap=caps.pop() if len(caps) == 1 else None,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds))


def unsupported(what: str, why: str) -> QuantkitError:
    """That our cache can't be used so."""
    return QuantkitError(f"quantkit's cache doesn't support {what}", why=why,
                         next="leave out past_key_values, or --kv")
