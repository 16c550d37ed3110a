"""Our weights and our KV cache in models of transformers (extra ``transformers``).

    from quantkit.api.transformers import Cache, quantize_linears

    model = AutoModelForCausalLM.from_pretrained("MODEL")
    quantize_linears(model, "int4-rtn")
    model.generate(**inputs, past_key_values=Cache(model, "snapkv(0.5)+int4"))

The cache comes with its attention, registered under the name ``quantkit``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from quantkit.api.progress import Progress, reported
from quantkit.checkpoint.manifest import LayerRow
from quantkit.formats.base import QuantizedTensor
from quantkit.kv.batch import Batch
from quantkit.kv.build import check_kv
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.models.architecture import LinearSlot, parse_config
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.plugins.manager import registry
from quantkit.quantization.memory import PlanRow
from quantkit.quantization.planning.plan import LayerRefusal, RowResolver, assign
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.quantization.solve import solve
from quantkit.runtime.modules_cache import ModulesCache, unsupported
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.progress import ProgressEvent


class Cache(ModulesCache):
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
        config = parse_config(model.config.to_dict())
        super().__init__(model, KVCache(config, spec, model.dtype, model.device))
        if (why := _reason_against(self.kv_cache)) is not None:
            raise UsageError(f"the KV setting {spec} can't be used in transformers", why=why,
                             next=f'quantkit.load("MODEL", kv="{spec}") runs it')

    def __repr__(self) -> str:
        return f"<Cache {self.kv_cache.spec}: {self.get_seq_length()} tokens, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that hold something: what a policy dropped is given back."""
        return self.kv_cache.used_bytes

    def reset(self) -> None:
        """Forget everything."""
        self.kv_cache.free(self.kv_cache.numbers)
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Raises QuantkitError: beams aren't supported."""
        raise unsupported("beam search", "its beams would have to share and copy pages")

    def crop(self, tokens_to_remove: int) -> None:
        """Raises QuantkitError: tokens can't be taken back."""
        if tokens_to_remove:
            raise unsupported("taking tokens back, as assisted decoding does",
                              "what was encoded or dropped can't be restored")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raises QuantkitError: rows can't be copied."""
        raise unsupported("copying rows of a batch", "each row's pages are its own")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raises QuantkitError: rows can't be chosen."""
        raise unsupported("choosing rows of a batch", "all of them end together")

    def next_batch(self, rows: int, tokens: int) -> Batch:
        cache = self.kv_cache
        if not cache.numbers:
            for _ in range(rows):
                cache.add()
        elif len(cache.numbers) != rows:
            raise UsageError(f"the cache holds {len(cache.numbers)} rows, and {rows} come",
                             why="a cache is for one batch", next="make a new Cache for another one")
        first = not cache.seen(cache.numbers[0])
        return Batch(cache, cache.numbers, "prefill_end" if first or tokens > 1 else "decode")

    def seen(self) -> int:
        numbers = self.kv_cache.numbers
        return self.kv_cache.seen(numbers[0]) if numbers else 0


def _reason_against(cache: KVCache) -> str | None:
    policy = cache.policy
    if policy.reread_prompt is not None:
        return f"{policy.name} reads a prompt twice, and transformers reads it once"
    if policy.on_prefill == "chunk" and policy.visible is None:
        return f"{policy.name} acts while a prompt is read, and transformers hands it over at once"
    return None


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
