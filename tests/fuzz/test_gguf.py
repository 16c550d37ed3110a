"""GGUF files: their bytes, metadata that says other things than the tensors, and models in several files."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.gguf_config import hf_config
from quantkit.sources.gguf_families import LONG_FACTORS, SHORT_FACTORS
from quantkit.sources.gguf_header import open_gguf
from quantkit.sources.gguf_tokenizer import tokenizer_files
from quantkit.testing import tiny_tokenizer
from quantkit.text.tokenizer import Tokenizer
from tests.helpers.gguf_models import write_model

HIDDEN, HEADS, FFN = 32, 4, 32
BLOCK = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN),
         "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
         "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}


def _write(path, arch, kind, model):
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())] if model == "gpt2" else [
        "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁a"]
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("smollm" if model == "gpt2" else "default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t.startswith("<") and not t.startswith("<0x") else 6 if t.startswith("<0x")
                            else 1 for t in tokens])
    if model == "gpt2":
        writer.add_token_merges(["Ġ t", "h e"])
    else:
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,),
              **{f"blk.0.{name}": shape for name, shape in BLOCK.items()}}
    for name, shape in shapes.items():
        values = np.ones(shape, np.float32)
        if kind is not None and len(shape) == 2:
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("gguf")
    return [_write(place / "llama.gguf", "llama", GGMLQuantizationType.Q8_0, "llama"),
            _write(place / "qwen3.gguf", "qwen3", None, "gpt2"),
            _write(place / "qwen2.gguf", "qwen2", GGMLQuantizationType.Q4_0, "gpt2"),
            *(_tiny(place, family) for family in ("mixtral", "qwen3_moe", "phi3"))]


def _tiny(place, family):
    """With tensors of three dimensions, or tables of a RoPE's factors."""
    long = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 32, "rope_scaling": {
        "rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}}
    write_model(place / f"{family}.gguf", family, num_hidden_layers=1, **(long if family == "phi3" else {}))
    return place / f"{family}.gguf"


def _read(path):
    source = GGUFSource(path, str(path))
    config = source.config()
    parse_config(config)
    names = list(source.tensors())
    for name in {*names[:4], *names[-4:]}:
        source.tensor(name)
    Tokenizer(source.side_files(), config).encode("a b")
    source.close()


def _header_size(path) -> int:
    header, data = open_gguf(path)
    data.close()
    return min(tensor.offset for tensor in header.tensors.values())


@pytest.mark.filterwarnings("ignore")
def test_bytes(files, fuzz, mutations, tmp_path):
    def parse(data):
        (tmp_path / "m.gguf").write_bytes(data)
        _read(tmp_path / "m.gguf")

    fuzz(parse, [path.read_bytes() for path in files], mutations["bytes"])


@pytest.mark.filterwarnings("ignore")
def test_bytes_of_the_header(files, fuzz, mutations, tmp_path):
    """Most of a file is numbers, of which all are allowed."""
    sizes = {path.read_bytes(): _header_size(path) for path in files}

    def parse(data):
        (tmp_path / "m.gguf").write_bytes(data)
        _read(tmp_path / "m.gguf")

    fuzz(parse, list(sizes),
         lambda data, chance: mutations["bytes"](data[:sizes[data]], chance) + data[sizes[data]:])


@pytest.mark.filterwarnings("ignore")
def test_metadata(files, fuzz, mutations):
    seeds = []
    for path in files:
        header, data = open_gguf(path)
        data.close()
        seeds.append(header.metadata)
    rows = len(seeds[0]["tokenizer.ggml.tokens"])
    shapes = {"model.embed_tokens.weight": (rows, HIDDEN), "model.layers.0.mlp.up_proj.weight": (FFN, HIDDEN)}
    tables = {name: np.ones(6, np.float32) for name in (LONG_FACTORS, SHORT_FACTORS)}

    def parse(metadata):
        if not isinstance(metadata, dict):
            return  # the reader makes nothing else
        long = tables if metadata.get("general.architecture") == "phi3" else {}
        config = hf_config(metadata, shapes, long, "m.gguf")
        tensor_shapes(parse_config(config))
        Tokenizer(tokenizer_files(metadata, "m.gguf", max(rows, 400)), config).encode("a b")

    fuzz(parse, seeds, mutations["json"])


@pytest.mark.filterwarnings("ignore")
def test_files_of_one_model(fuzz, mutations, tmp_path):
    """One of three files is mutated, the others are what they were."""
    write_model(tmp_path / "m.gguf", "mixtral", shards=3, num_hidden_layers=1)
    places = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    contents = [place.read_bytes() for place in places]
    sizes = {data: _header_size(place) for place, data in zip(places, contents)}

    def parse(files):
        for place, data in zip(places, files):
            place.write_bytes(data)
        _read(places[0])

    def mutate(files, chance):
        number = chance.randrange(3)
        data = files[number]
        changed = mutations["bytes"](data[:sizes[data]], chance) + data[sizes[data]:]
        return [*files[:number], changed, *files[number + 1:]]

    fuzz(parse, [contents], mutate)
