"""llama2.c's stories260K as a GGUF in float32, for :mod:`quality`: its weights lie on no grid.

    python evals/peers/stories_gguf.py stories260K.bin tok512.bin stories260K.gguf

The file has a header of seven integers and then float32 matrices; its tied embedding is the head as well. The
vocabulary has a score and the bytes of each token, as SentencePiece's BPE.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

import gguf
import numpy as np

FIRST_BYTE = 3
"""Tokens 0 to 2 are unknown, begin and end; a token for each byte follows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.weights, args.tokens, args.out)


def convert(weights: Path, tokens: Path, out: Path) -> None:
    """Write the GGUF."""
    content = weights.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("<7i", content)
    if vocabulary < 0:
        raise SystemExit(f"{weights} has a head of its own; only tied ones are known here")
    values = np.frombuffer(content, np.float32, offset=28)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(hidden)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(dim // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    add_vocabulary(writer, tokens.read_bytes(), vocabulary)
    kv = dim // heads * kv_heads
    stacks = {"attn_norm": (dim,), "attn_q": (dim, dim), "attn_k": (kv, dim), "attn_v": (kv, dim),
              "attn_output": (dim, dim), "ffn_norm": (dim,), "ffn_gate": (hidden, dim),
              "ffn_down": (dim, hidden), "ffn_up": (hidden, dim)}
    start = vocabulary * dim
    writer.add_tensor("token_embd.weight", values[:start].reshape(vocabulary, dim))
    for name, shape in stacks.items():  # of all layers, one kind after another
        size = int(np.prod(shape))
        for layer in range(layers):
            writer.add_tensor(f"blk.{layer}.{name}.weight", values[start:start + size].reshape(shape))
            start += size
    writer.add_tensor("output_norm.weight", values[start:start + dim])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, content: bytes, vocabulary: int) -> None:
    """Tokens, scores and kinds, as llama.cpp's own conversion has them."""
    # the longest token's length comes first
    tokens = []
    scores = []
    kinds = []
    place = 4
    for number in range(vocabulary):
        score, length = struct.unpack_from("<fi", content, place)
        text = content[place + 8:place + 8 + length].decode("utf-8")
        place += 8 + length
        kind = gguf.TokenType.NORMAL
        if number < FIRST_BYTE:
            kind = gguf.TokenType.UNKNOWN if number == 0 else gguf.TokenType.CONTROL
            text = ("<unk>", "<s>", "</s>")[number]
        elif number < FIRST_BYTE + 256:
            kind, text = gguf.TokenType.BYTE, f"<0x{number - FIRST_BYTE:02X}>"
        tokens.append(text.replace(" ", "▁") if kind == gguf.TokenType.NORMAL else text)
        scores.append(score)
        kinds.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)  # a window is what the text has


if __name__ == "__main__":
    main()
