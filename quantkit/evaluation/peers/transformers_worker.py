"""The backend of :mod:`worker` for transformers: needs torch and transformers, and nothing of quantkit."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "compressed-tensors": "compressed-tensors"}
"""Quantizers and the distribution whose version is told."""
DEQUANTIZE = "dequantize"
GROUP = 64
"""Weights that share a scale in torchao's int4."""


class TransformersModel:
    """A causal language model of transformers.

    Args:
        options: ``path``, ``quantization``, ``dtype``, ``device``, ``threads``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(options["threads"])
        torch.set_grad_enabled(False)
        transformers.utils.logging.disable_progress_bar()
        begin = time.perf_counter()  # the libraries are there
        self._path, self._how = options["path"], options["quantization"]
        settings: dict[str, Any] = {"dtype": options["dtype"]}
        if options["device"] != "cpu" or importlib.util.find_spec("accelerate"):
            settings["device_map"] = options["device"]
        if self._how != "none":
            settings["quantization_config"] = quantization(self._how, options["device"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(self._path, use_safetensors=True,
                                                                        **settings)
        self._model.eval()
        self._load_s = time.perf_counter() - begin
        self._tokenizer: Any = None
        if not Path(self._path).is_dir() or (Path(self._path) / "tokenizer_config.json").exists():
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._path)
        self._cache: Any = None

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import PackageNotFoundError, version

        import transformers

        method, package = self._method()
        tool = f"transformers {transformers.__version__}"
        with contextlib.suppress(PackageNotFoundError):  # it loads such a checkpoint by itself
            tool += f", {package} {version(package)}" if package else ""
        folder, as_stored = Path(self._path), self._how in ("none", DEQUANTIZE)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() and as_stored else []
        return {"tool": tool, "method": method, "vocab_size": self._model.config.get_text_config().vocab_size,
                "bits_per_weight": bits_per_weight(self._model),
                "file_bytes": sum(file.stat().st_size for file in files) or None,
                "load_s": self._load_s, "weight_bytes": int(sum(map(stored_bytes, tensors_of(self._model))))}

    def encode(self, text: str) -> list[int] | None:
        if self._tokenizer is None:
            return None
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def logits(self, ids: list[int], skip: int) -> tuple[int, Iterator[bytes]]:
        """Columns, and float32 rows of all positions but the last, without the first ``skip``."""
        logits = self._model(self._ids(ids), use_cache=False).logits[0, skip:-1].float().contiguous().cpu()
        return logits.shape[-1], (row.numpy().tobytes() for row in logits)

    def prefill(self, ids: list[int]) -> int:
        """Read a prompt from an empty cache; the likeliest token after it."""
        self._cache = None
        return self._next(self._ids(ids))

    def step(self, token: int) -> int:
        """One token more; the likeliest one after it."""
        return self._next(self._ids([token]))

    def _ids(self, ids: list[int]) -> Any:
        import torch

        return torch.tensor([ids], device=self._model.device)

    def _next(self, ids: Any) -> int:
        output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        return int(output.logits[0, -1].argmax())

    def _method(self) -> tuple[str, str | None]:
        """How the weights are kept, and the distribution that does it."""
        if self._how == DEQUANTIZE:
            return "compressed-tensors, dequantized", PACKAGES["compressed-tensors"]
        if self._how != "none":
            library, _, kind = self._how.partition("-")
            return f"{library} {kind}", PACKAGES[library]
        stored = getattr(self._model.config, "quantization_config", None)
        if stored is None:
            dtype = str(self._model.dtype).removeprefix("torch.")
            return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype), None
        written = stored if isinstance(stored, dict) else stored.to_dict()
        name = written.get("quant_method", "quantized")
        name = str(getattr(name, "value", name))
        return name, PACKAGES.get(name)


def quantization(how: str, device: str) -> Any:
    """The configuration of a quantizer that works while loading."""
    import torch
    import transformers

    if how == DEQUANTIZE:
        return transformers.CompressedTensorsConfig(dequantize=True)
    library, _, kind = how.partition("-")
    if library == "bitsandbytes":
        if kind == "int8":
            return transformers.BitsAndBytesConfig(load_in_8bit=True)
        return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind,
                                               bnb_4bit_compute_dtype=torch.bfloat16)
    from torchao import quantization as torchao

    if kind == "int8":
        return transformers.TorchAoConfig(quant_type=torchao.Int8WeightOnlyConfig())
    if device != "cpu":
        return transformers.TorchAoConfig(quant_type=torchao.Int4WeightOnlyConfig(
            group_size=GROUP, int4_packing_format="tile_packed_to_4d"))
    # torchao packs 4 bits for GPUs only: on a CPU each takes a byte, which the bits a weight show
    dtypes: Any = torch  # its types lack int4
    return transformers.TorchAoConfig(quant_type=torchao.IntxWeightOnlyConfig(
        weight_dtype=dtypes.int4, granularity=torchao.granularity.PerGroup(GROUP)))


def tensors_of(module: Any, recurse: bool = True) -> Iterator[Any]:
    """Parameters and buffers of a model, each once, with what bitsandbytes keeps beside its weights."""
    seen = set()
    for tensor in (*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)):
        state = getattr(tensor, "quant_state", None)
        scales = [getattr(place, "absmax", None) for place in (state, getattr(state, "state2", None))]
        for item in (tensor, getattr(tensor, "SCB", None), *scales):
            if item is not None and id(item) not in seen:
                seen.add(id(item))
                yield item


def stored_bytes(tensor: Any) -> int:
    """Of a tensor; of a subclass that is made of others, of these."""
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return int(tensor.numel() * tensor.element_size())


def bits_per_weight(model: Any) -> float | None:
    """Stored bits of all Linears over their parameters, without biases and a head that is the embedding.

    ``None`` if a part of the weights is in modules that aren't Linears: of those it isn't known.
    """
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    stored = weights = 0
    for module in model.modules():
        if not hasattr(module, "in_features") or not hasattr(module, "out_features"):
            if any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
                return None
            continue
        if getattr(module, "weight", None) is embedding and embedding is not None:
            continue
        bias = getattr(module, "bias", None)
        stored += sum(stored_bytes(tensor) for tensor in tensors_of(module, recurse=False)
                      if tensor is not bias)
        weights += module.in_features * module.out_features
    return 8 * stored / weights if weights else None


def open_model(options: dict[str, Any]) -> TransformersModel:
    """What :mod:`worker` asks for."""
    return TransformersModel(options)
