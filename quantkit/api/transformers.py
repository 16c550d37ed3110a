"""Our weights and our KV cache in models of transformers (extra ``transformers``).

    from quantkit.api.transformers import Cache, quantize_linears

    model = AutoModelForCausalLM.from_pretrained("MODEL")
    quantize_linears(model, "int4-rtn")
    model.generate(**inputs, past_key_values=Cache(model, "snapkv(0.5)+int4"))

transformers' own cache classes hand keys and values to an attention function. Ours stores them as codes, in
pages of which every head may hold another number, and so it comes with the attention that reads these,
registered under the name ``quantkit``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.api.progress import Progress, reported
from quantkit.checkpoint.manifest import LayerRow
from quantkit.formats.base import QuantizedTensor
from quantkit.kv.batch import Batch
from quantkit.kv.build import check_kv
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.models.architecture import LinearSlot, parse_config
from quantkit.models.forward_context import ForwardContext
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.plugins.manager import registry
from quantkit.quantization.memory import PlanRow
from quantkit.quantization.planning.plan import LayerRefusal, RowResolver, assign
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.quantization.solve import solve
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.progress import ProgressEvent

NAME = "quantkit"
"""Of our attention, as transformers' ``attn_implementation``."""
_MARK = "_quantkit_cache_layer"
"""The attribute by which attention knows the keys of a cache of ours."""


class Cache(TransformersCache):
    """A KV cache for ``model.generate(…, past_key_values=cache)``, kept as ``--kv`` keeps it.

    Each layer attends by our attention while it stores its keys here, and by its own otherwise. Prompts of a
    batch must be equally long. A cache is for one text, or one batch of texts, that goes on. No gradients
    flow through it.

    Args:
        model: the model; its config says layers, heads and windows.
        kv: the KV setting: ``int8``, ``"snapkv(0.5)+int4"``.

    Attributes:
        kv_cache: the pages and who holds them.

    Raises:
        UsageError: the setting can't be read, doesn't fit the model, or needs quantkit's own engine.
        UnsupportedModelError: the model's family isn't known.

    >>> cache = Cache(model, "snapkv(0.5)+int4")
    >>> answer = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    >>> cache.get_seq_length() == answer.shape[1] - 1
    True
    """

    def __init__(self, model: PreTrainedModel, kv: str | KVSpec = "none") -> None:
        spec = parse_kv(kv) if isinstance(kv, str) else kv
        check_kv(spec)
        self.config = parse_config(model.config.to_dict())
        self.kv_cache = KVCache(self.config, spec, model.dtype, model.device)
        if (why := _reason_against(self.kv_cache)) is not None:
            raise UsageError(f"the KV setting {spec} can't be used in transformers", why=why,
                             next=f'quantkit.load("MODEL", kv="{spec}") runs it')
        self._model_config = model.config.get_text_config()
        self._batch: Batch | None = None
        self._context: ForwardContext | None = None
        self._own: str | None = None
        self._checked: tuple[int | None, torch.Tensor | None] | None = None
        self._layer = 0
        super().__init__(layers=[_Layer(self, index) for index in range(self.config.num_layers)])

    def __repr__(self) -> str:
        return f"<Cache {self.kv_cache.spec}: {self.get_seq_length()} tokens, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that hold something: what a policy dropped is given back."""
        return self.kv_cache.used_bytes

    def reset(self) -> None:
        """Forget everything."""
        self.kv_cache.free(self.kv_cache.numbers)
        self._batch, self._layer = None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Raises QuantkitError: beams aren't supported."""
        raise _unsupported("beam search", "its beams would have to share and copy pages")

    def crop(self, tokens_to_remove: int) -> None:
        """Raises QuantkitError: tokens can't be taken back."""
        if tokens_to_remove:
            raise _unsupported("taking tokens back, as assisted decoding does",
                               "what was encoded or dropped can't be restored")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raises QuantkitError: rows can't be copied."""
        raise _unsupported("copying rows of a batch", "each row's pages are its own")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raises QuantkitError: rows can't be chosen."""
        raise _unsupported("choosing rows of a batch", "all of them end together")

    def take(self, layer: int, keys: torch.Tensor) -> None:
        """Take note of a step's keys ``[B, Hkv, T, D]``: the layer's attention will be ours, this once."""
        if layer != self._layer or self._own is not None:
            self._restore()
            self.reset()
            raise _unsupported("this model, or going on after an error",
                               f"keys of layer {layer} came where those of layer {self._layer} were awaited")
        if layer == 0:
            self._begin(keys.shape[0], keys.shape[2])
        self._own = self._model_config._attn_implementation
        self._model_config._attn_implementation = NAME
        setattr(keys, _MARK, (self, layer))

    @torch.no_grad()
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """Store a layer's keys and values, rotated, and attend: ``[B, H, T, D]``."""
        self._restore()
        assert self._batch is not None and self._context is not None
        window = self.config.sliding_windows[layer]
        self._layer = -1  # until the layer is whole
        self._check(mask, window, q.shape[2])
        out = self._batch.attend(layer, q, k, v, self._context, window,
                                 None if sinks is None else sinks.detach().float())
        self._layer = layer + 1
        if self._layer == self.config.num_layers:
            self._batch.end()
            self._layer = 0
        return out

    def _restore(self) -> None:
        if self._own is not None:
            self._model_config._attn_implementation, self._own = self._own, None

    def _check(self, mask: torch.Tensor | None, window: int | None, tokens: int) -> None:
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
            raise _unsupported("a padded batch, or another mask than a causal one",
                               "padding would be stored as if it were text")
        self._checked = window, mask

    def _begin(self, rows: int, tokens: int) -> None:
        cache = self.kv_cache
        if not cache.numbers:
            for _ in range(rows):
                cache.add()
        elif len(cache.numbers) != rows:
            raise UsageError(f"the cache holds {len(cache.numbers)} rows, and {rows} come",
                             why="a cache is for one batch", next="make a new Cache for another one")
        first = not cache.seen(cache.numbers[0])
        self._batch = Batch(cache, cache.numbers, "prefill_end" if first or tokens > 1 else "decode")
        self._context = _Unrotated(self.config, self._batch.next_positions(tokens), cache.dtype)
        self._checked = None
        self._batch.begin([tokens] * rows)


class _Layer(CacheLayerMixin):
    """What transformers asks of a layer's cache."""

    is_compileable = False
    is_sliding = False
    is_initialized = True
    supports_early_init = False
    is_croppable = False

    def __init__(self, cache: Cache, index: int) -> None:
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
        numbers = self._cache.kv_cache.numbers
        return self._cache.kv_cache.seen(numbers[0]) if numbers else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

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
        raise _unsupported("this model", "it changes keys behind its cache, or has no cache of ours")
    out: torch.Tensor = cache.attend(layer, query, key, value, attention_mask, options.get("s_aux"))
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


def _reason_against(cache: KVCache) -> str | None:
    policy = cache.policy
    if policy.reread_prompt is not None:
        return f"{policy.name} reads a prompt twice, and transformers reads it once"
    if policy.on_prefill == "chunk" and policy.visible is None:
        return f"{policy.name} acts while a prompt is read, and transformers hands it over at once"
    return None


def _unsupported(what: str, why: str) -> QuantkitError:
    return QuantkitError(f"quantkit's cache doesn't support {what}", why=why,
                         next="leave out past_key_values, or that")


class QuantizedLinear(torch.nn.Module):
    """A Linear whose weight is packed, on the device where it was.

    Args:
        packed: the weight ``[out, in]``.
        bias: ``[out]``.
        dtype: of the activations, and of what a kernel is chosen for.
    """

    def __init__(self, packed: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        stored = QuantizedWeight(packed.to(device))
        self.out_features, self.in_features = packed.shape
        self.packed = stored.packed(dtype) if device.type == "cpu" else stored
        self.bias: torch.Tensor | None
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._spec, self._device = packed.spec, device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, in]`` → ``[…, out]``. Raises QuantkitError: a gradient is wanted."""
        if x.requires_grad and torch.is_grad_enabled():
            raise QuantkitError("nothing can be trained through a quantized Linear",
                                why="its kernel has no gradient",
                                next="call the model under torch.no_grad(), or leave it unquantized")
        return self.packed.multiply(x, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise QuantkitError("a module with quantized Linears can't be saved",
                            why="their weights are packed for the kernel of this machine",
                            next='quantkit.quantize(MODEL, RECIPE, "OUT") makes a checkpoint')

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._spec.label()}"

    def _apply(self, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if (moved := fn(torch.empty(0, device=self._device)).device) != self._device:
            raise QuantkitError(f"a quantized Linear can't be moved from {self._device} to {moved}",
                                why="its weight is packed for the kernel of one device",
                                next="move the model first, then quantize it")
        return super()._apply(fn, recurse)


def quantize_linears(model: torch.nn.Module, recipe: str | Recipe = "int8", *,
                     progress: Progress = True) -> list[LayerRow]:
    """Replace a module's Linears by quantized ones, in memory and without calibration.

    The module is for inference then: nothing of it requires a gradient, and it can't be saved. Weights that
    are no ``nn.Linear``'s stay: embeddings, and experts that a model keeps in one tensor.

    Args:
        model: any module; names of its Linears are matched by the recipe's rules. A Linear whose weight is
            another module's too, as a tied head's is, stays.
        recipe: a recipe whose methods need no calibration: ``int8``, ``int4-rtn``, ``nf4``, ``fp8``.
        progress: whether a bar is shown, or a callback.

    Returns:
        What became of each Linear that a rule takes, with its error.

    Raises:
        UsageError: the recipe calibrates, or no rule takes any Linear.
        QuantkitError: a method or format refuses a weight. Linears before it are quantized.

    >>> rows = quantize_linears(model, "int4-rtn", progress=False)
    >>> rows[0].name, rows[0].method
    ('model.layers.0.self_attn.q_proj', 'rtn')
    """
    given = load_recipe(recipe) if isinstance(recipe, str) else recipe
    given = given.model_copy(update={"rules": tuple(rule.model_copy(update={"optional": True})
                                                    for rule in given.rules)})
    linears = _own_linears(model)
    slots = [LinearSlot(name, linear.out_features, linear.in_features, _layer_of(name), name)
             for name, linear in linears.items()]
    resolver, rows = RowResolver(given), list[PlanRow]()
    for slot, index in zip(slots, assign(given, slots, tied=False)):
        weight = linears[slot.name].weight
        info = TensorInfo(f"{slot.name}.weight", tuple(weight.shape), weight.dtype)
        try:
            row = resolver.row(slot, index, {info.name: info})
        except LayerRefusal as error:
            raise UsageError(f"{slot.name} can't be quantized by recipe {given.name!r}", why=str(error),
                             next="choose another recipe: quantkit recipes list") from None
        if row.method is not None:
            rows.append(row)
    if not rows:
        raise UsageError(f"recipe {given.name!r} takes none of the module's {len(slots)} Linears",
                         next="write a recipe whose rules match their names")
    calibrated = {row.method for row in rows if row.method and registry("methods").get(row.method).needs}
    if calibrated or given.transforms:
        raise UsageError(f"recipe {given.name!r} needs calibration",
                         why=f"{', '.join(sorted(calibrated)) or 'its transforms'} can't do without",
                         next='quantkit.quantize(MODEL, RECIPE, "OUT"), or a recipe such as int8 or int4-rtn')
    done = list[LayerRow]()
    model.requires_grad_(False)
    with reported(progress, f"quantizing by {given.name}") as listener:
        for number, row in enumerate(rows):
            listener(ProgressEvent(number, len(rows), row.name))
            linear = linears.pop(row.name)
            weight = linear.weight.detach()
            ((packed, record),) = solve([row], weight.dtype, weight, None)
            parent, _, last = row.name.rpartition(".")
            setattr(model.get_submodule(parent), last,
                    QuantizedLinear(packed, linear.bias, weight.dtype, weight.device))
            done.append(record)
            del linear, weight
        listener(ProgressEvent(len(rows), len(rows), "quantized"))
    return done


def _layer_of(name: str) -> int | None:
    """``model.layers.3.mlp.up_proj`` → 3."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    return None if number is None else int(number[1])


def _own_linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The Linears by name, but for those that share their weight."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {name: module for name, module in model.named_modules()
            if type(module) is torch.nn.Linear and owners[id(module.weight)] == 1}


__all__ = ["Cache", "QuantizedLinear", "quantize_linears"]
