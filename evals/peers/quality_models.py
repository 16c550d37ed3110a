"""The one model that :mod:`quality` gives to all, as llama.cpp and as everybody else reads it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize
from llama_cpp import LlamaCpp
from safetensors.torch import save_file

from quantkit.models.architecture import parse_config
from quantkit.quantization.calibration.data import load_calibration
from quantkit.quantization.specs import CalibrationSpec
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.local import LocalSource
from quantkit.text.tokenizer import Tokenizer

OVERRIDES = ("--override-kv", "tokenizer.ggml.add_bos_token=bool:false")  # a window is what the text has


def make_base(source: Path, work: Path, theirs: LlamaCpp | None, dtype: str,
              context: int) -> tuple[Path, Path]:
    """``base.gguf`` and the same weights, bit for bit, as a model folder.

    Args:
        source: GGUF of a Llama, of any type.
        work: where both are made.
        theirs: llama.cpp's programs; without them the folder is made of ``source`` itself.
        dtype: ``BF16`` or ``F32``.
        context: what the metadata shall say.
    """
    file, folder = (work / "base.gguf" if theirs else source), work / "base"
    if theirs and not file.exists():
        part = file.with_suffix(".part")
        theirs.run("llama-quantize", "--allow-requantize", *OVERRIDES, "--override-kv",
                   f"llama.context_length=int:{context}", str(source), str(part), dtype)
        part.rename(file)
    if not folder.exists():
        write_folder(file, folder, torch.float32 if dtype == "F32" else torch.bfloat16, context)
    return file, folder


def write_folder(file: Path, folder: Path, dtype: torch.dtype, context: int) -> None:
    """A GGUF of a Llama as a model folder, its weights rounded to ``dtype``."""
    source = GGUFSource(file, str(file))
    config = source.config() | {"torch_dtype": str(dtype).removeprefix("torch."),
                                "max_position_embeddings": context}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    tensors = {}
    for name in source.tensors():
        tensor = raw[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:  # llama.cpp rotates neighbors, transformers halves
                values = values.unflatten(0, (config[heads], -1, 2)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(values.bfloat16(), source.tensor(name)), name
        tensors[name] = values.to(dtype).contiguous()
    part = folder.with_suffix(".part")
    part.mkdir(exist_ok=True)
    for side, content in source.side_files().items():
        (part / side).write_bytes(content)
    (part / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    part.rename(folder)


def calibration_tokens(folder: Path, text: Path, samples: int, length: int) -> tuple[torch.Tensor, str]:
    """The windows that ``quantkit quantize --calibration`` takes of a text, int64 ``[windows, tokens]``, and
    the same as text again."""
    source = LocalSource(folder, str(folder))
    config = source.config()
    tokenizer = Tokenizer(source.side_files(), config)
    spec = CalibrationSpec(text=str(text), windows=samples, window=length)
    tokens = load_calibration(spec, tokenizer, parse_config(config).vocab_size, 1).tokens
    return tokens, tokenizer.decode(tokens.flatten().tolist())


def check_tokens(folder: Path, file: Path, text: Path, theirs: LlamaCpp) -> None:
    """Exits unless llama.cpp splits the text into the tokens that quantkit scores."""
    source = LocalSource(folder, str(folder))
    ours = Tokenizer(source.side_files(), source.config()).encode(
        text.read_text(encoding="utf-8"), special=False)
    output = theirs.run("llama-tokenize", "-m", str(file), "-f", str(text), "--ids", "--no-bos")
    if json.loads(output) != ours:
        raise SystemExit(f"llama.cpp splits {text.name} into other tokens")
