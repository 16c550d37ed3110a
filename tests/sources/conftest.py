from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 4,
        "num_hidden_layers": 0}


def build_safetensors(tensors: dict, metadata: dict | None = None, *, header: bytes | None = None,
                      pad: int = 8) -> bytes:
    """``tensors``: name → (dtype code, shape, bytes), laid one after another."""
    entries, data = {}, b""
    for name, (code, shape, raw) in tensors.items():
        span = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": span}
        data += raw
    if metadata is not None:
        entries["__metadata__"] = metadata
    if header is None:
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % pad)
    return struct.pack("<Q", len(header)) + header + data


def build_folder(folder: Path, **files: bytes | dict | str) -> Path:
    """A folder with ``config.json`` and the given files; ``__`` in a keyword stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config__json": TINY, **files}.items():
        if isinstance(content, dict):
            content = json.dumps(content)
        if isinstance(content, str):
            content = content.encode()
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


@pytest.fixture
def safetensors():
    return build_safetensors


@pytest.fixture
def model_folder():
    return build_folder


def build_gguf(path: Path, *, arch: str = "llama", layers: int = 2, heads: int = 4, kv_heads: int = 2,
               dim: int = 8, ffn: int = 64, types: dict | None = None, extra=(), drop=(),
               tensors: dict | None = None, tied: bool = True, tokenizer=None, seed: int = 0,
               biases: bool = False, raw: dict | None = None) -> dict:
    """Write a tiny GGUF with the ``gguf`` library; returns each tensor's float32 values by GGUF name.

    Args:
        types: GGUF name → quantization type; the others are F32.
        extra: (method of GGUFWriter, arguments) called after the ordinary keys.
        drop: keys that are left out.
        tensors: GGUF name → float32 array, added or replacing.
        tokenizer: called with the writer; default: byte-level with 300 tokens.
        raw: GGUF name → quantization type and uint8 rows of its blocks, stored as they are.
    """
    import numpy as np
    from gguf import GGUFWriter
    from gguf.quants import dequantize, quantize

    hidden, vocab, gemma = heads * dim, 300, arch.startswith("gemma")
    random = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    for i in range(layers):
        block = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (heads * dim, hidden),
                 "attn_k": (kv_heads * dim, hidden), "attn_v": (kv_heads * dim, hidden),
                 "attn_output": (hidden, heads * dim), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
                 "ffn_down": (hidden, ffn)}
        if gemma:
            block |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
        if arch in ("qwen3", "gemma3"):
            block |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        if biases:
            shapes |= {f"blk.{i}.{n}.bias": (shapes[f"blk.{i}.{n}.weight"][0],)
                       for n in ("attn_q", "attn_k", "attn_v")}
    values = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    values.update(tensors or {})
    writer = GGUFWriter(path, arch)
    keys = [("add_block_count", layers), ("add_context_length", 128), ("add_embedding_length", hidden),
            ("add_feed_forward_length", ffn), ("add_head_count", heads), ("add_head_count_kv", kv_heads),
            ("add_layer_norm_rms_eps", 1e-5), ("add_rope_freq_base", 10000.0),
            ("add_rope_dimension_count", dim), ("add_vocab_size", vocab),
            *([("add_sliding_window", 32)] if gemma else [])]
    for method, argument in keys:
        if method not in drop:
            getattr(writer, method)(argument)
    for method, *arguments in extra:
        getattr(writer, method)(*arguments)
    (tokenizer or byte_tokenizer)(writer)
    stored = {}
    for name, value in values.items():
        kind = (types or {}).get(name)
        if name in (raw or {}):
            kind, blocks = raw[name]
            writer.add_tensor(name, blocks, raw_dtype=kind)
        elif kind is None:
            writer.add_tensor(name, value)
            stored[name] = value
        else:
            packed = quantize(value, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            stored[name] = dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def byte_tokenizer(writer, pre: str | None = "smollm", *, tokens=None, merges=None, kinds=None) -> None:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "Ġ t", "Ġt he", "1 2"] if merges is None else merges
    joined = ("".join(m.split(" ")) for m in merges)
    names = ["<|end|>", "<think>", *alphabet, *joined] if tokens is None else tokens
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([3, 4, *[1] * (len(names) - 2)] if kinds is None else kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)


@pytest.fixture(scope="session")
def gguf_file():
    return build_gguf


@pytest.fixture
def byte_level():
    return byte_tokenizer
