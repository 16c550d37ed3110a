from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.sources import gguf as module
from quantkit.sources.base import file_bytes, quantized_types, stored_tensors
from quantkit.sources.causal_lm import ResolvedHeadSource
from quantkit.sources.gguf import KIND, GGUFSource
from quantkit.sources.gguf_header import open_gguf
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError


def rotate_half_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """A head's rows (0, 1, 2, 3, …) are the pairs (0, d/2), (1, d/2+1), … of the rotate-half form."""
    dim = rows.shape[0] // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(dim):
            out[head * dim + i // 2 + (i % 2) * (dim // 2)] = rows[head * dim + i]
    return out


LAYER = {"self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
         "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
         "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight",
         "mlp.down_proj.weight": "ffn_down.weight", "input_layernorm.weight": "attn_norm.weight",
         "post_attention_layernorm.weight": "ffn_norm.weight"}


GEMMA = {**LAYER, "post_attention_layernorm.weight": "post_attention_norm.weight",
         "pre_feedforward_layernorm.weight": "ffn_norm.weight",
         "post_feedforward_layernorm.weight": "post_ffw_norm.weight"}


def opened(path, **kwargs) -> GGUFSource:
    return GGUFSource(path, str(path), **kwargs)


@pytest.mark.parametrize("arch,tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False),
                                       ("gemma2", True), ("gemma3", True)])
def test_a_model_of_each_architecture(tmp_path, gguf_file, arch, tied):
    values = gguf_file(tmp_path / "m.gguf", arch=arch, tied=tied, biases=arch == "qwen2",
                       types={"blk.0.ffn_up.weight": Q.Q8_0, "blk.0.attn_q.weight": Q.Q4_1,
                              "token_embd.weight": Q.F16, "blk.1.ffn_down.weight": Q.BF16})
    source = opened(tmp_path / "m.gguf")
    config = parse_config(source.config())
    assert {n: i.shape for n, i in source.tensors().items()} == tensor_shapes(config)
    assert config.tie_word_embeddings is tied
    for name, ggml in (GEMMA if arch.startswith("gemma") else LAYER).items():
        for layer in range(2):
            wanted = values[f"blk.{layer}.{ggml}"]
            if arch.startswith("gemma") and name.endswith("norm.weight"):
                wanted = wanted - 1  # the file's multiply by themselves, config.json's by 1 more
            if arch == "llama" and name[10:16] in ("q_proj", "k_proj"):
                wanted = rotate_half_order(wanted, 4 if "q_proj" in name else 2)
            found = source.tensor(f"model.layers.{layer}.{name}")
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, torch.from_numpy(wanted.copy()).bfloat16()), (layer, name)
    assert torch.equal(source.tensor("model.embed_tokens.weight"),
                       torch.from_numpy(values["token_embd.weight"].copy()).bfloat16())
    if not tied:
        head = torch.from_numpy(values["output.weight"]).bfloat16()
        assert torch.equal(source.tensor("lm_head.weight"), head)


def test_biases_of_q_and_k_are_reordered_too(tmp_path, gguf_file):
    values = gguf_file(tmp_path / "m.gguf", biases=True)
    source = opened(tmp_path / "m.gguf")
    for part, heads in (("q", 4), ("k", 2)):
        wanted = torch.from_numpy(rotate_half_order(values[f"blk.1.attn_{part}.bias"], heads)).bfloat16()
        assert torch.equal(source.tensor(f"model.layers.1.self_attn.{part}_proj.bias"), wanted)
    wanted = torch.from_numpy(values["blk.1.attn_v.bias"]).bfloat16()
    assert torch.equal(source.tensor("model.layers.1.self_attn.v_proj.bias"), wanted)


def test_large_tensors_are_dequantized_in_pieces(tmp_path, gguf_file, monkeypatch):
    gguf_file(tmp_path / "m.gguf", types={"token_embd.weight": Q.Q8_0})
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
    whole = [opened(tmp_path / "m.gguf").tensor(name) for name in names]
    monkeypatch.setattr(module, "_CHUNK", 7 * 32)
    assert all(torch.equal(opened(tmp_path / "m.gguf").tensor(n), w) for n, w in zip(names, whole))


def test_a_tensor_is_its_reader_s_own(tmp_path, gguf_file):
    gguf_file(tmp_path / "m.gguf")
    source = opened(tmp_path / "m.gguf")
    before = source.tensor("model.norm.weight").clone()
    source.tensor("model.norm.weight").zero_()
    assert torch.equal(source.tensor("model.norm.weight"), before)
    source.close()
    with pytest.raises(SourceError, match="closed"):
        source.tensor("model.norm.weight")
    with pytest.raises(SourceError, match="no tensor for 'x'"):
        source.tensor("x")


@pytest.mark.parametrize("kwargs,what", [
    ({"arch": "phi2"}, "'phi2'"),
    ({"tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((8, 32), np.float32)}}, "ffn_gate_exps"),
    ({"tensors": {"blk.00.attn_q.weight": np.zeros((8, 32), np.float32)}}, "blk.00"),
    ({"tensors": {"rope_factors_long.weight": np.zeros(4, np.float32)}}, "rope_factors_long"),
    ({"tensors": {"blk.0.attn_q.weight": np.zeros((24, 32), np.float32)}}, "24 rows, not 4 heads of 8"),
    ({"tensors": {"rope_freqs.weight": np.full(4, 3, np.float32)}}, "rope_freqs"),
    ({"extra": [("add_uint16", "split.count", 3)]}, "one of 3 files"),
    ({"extra": [("add_expert_count", 4)]}, "ffn_gate"),
    ({"arch": "qwen2", "extra": [("add_expert_count", 4)]}, "expert_count"),
    ({"arch": "qwen2", "tensors": {"rope_freqs.weight": np.ones(4, np.float32)}}, "rope_freqs"),
    ({"tensors": {"rope_freqs.weight": np.ones(2**15, np.float32)}}, "a number for each frequency"),
    ({"tensors": {"rope_freqs.weight": np.ones((1, 4), np.float32)}}, "a number for each frequency"),
    ({"drop": ["add_block_count"]}, "block_count"),
    ({"tensors": {"blk.0.ffn_up.weight": np.zeros((64, 32), np.int8)}}, "'blk.0.ffn_up.weight' as I8"),
    ({"tensors": {"rope_freqs.weight": np.ones(4, np.int8)}}, "'rope_freqs.weight' as I8"),
])
def test_what_can_t_be_taken_is_refused_at_once(tmp_path, gguf_file, kwargs, what):
    gguf_file(tmp_path / "m.gguf", **kwargs)
    with pytest.raises(SourceError, match=what) as caught:
        opened(tmp_path / "m.gguf")
    assert "m.gguf" in caught.value.what and caught.value.next


def _blocks(kind: Q, values: int) -> np.ndarray:
    """Random bytes of a row."""
    block, width = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(kind.value)
    return random.integers(0, 256, (32, values // block * width), np.uint8)


def _can_dequantize(kind: Q) -> bool:
    try:
        dequantize(np.zeros_like(_blocks(kind, 256)), kind)
    except NotImplementedError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", Q, ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_library_reads_it_or_refused_by_name(tmp_path, gguf_file, kind):
    blocks, path = _blocks(kind, 256), tmp_path / "m.gguf"
    if _can_dequantize(kind):  # values that are no numbers are refused
        blocks[~np.isfinite(dequantize(blocks, kind)).all(axis=1)] &= 0xBF  # no exponent is all ones
    gguf_file(path, ffn=256, layers=1, raw={"blk.0.ffn_down.weight": (kind, blocks)})
    if not _can_dequantize(kind):
        with pytest.raises(SourceError, match=f"'blk.0.ffn_down.weight' as {kind.name}"):
            opened(path)
        return
    tensor = opened(path).tensor("model.layers.0.mlp.down_proj.weight")
    wanted = torch.from_numpy(np.array(dequantize(blocks, kind), np.float32)).bfloat16()
    assert tensor.shape == (32, 256) and torch.equal(tensor.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize(("stored", "name"), [("output_norm", "model.norm"),
                                              ("token_embd", "model.embed_tokens"),
                                              ("blk.1.attn_q", "model.layers.1.self_attn.q_proj")])
def test_values_that_are_not_finite_are_refused(tmp_path, gguf_file, stored, name):
    values = dict(gguf_file(tmp_path / "first.gguf"))[f"{stored}.weight"].copy()
    values.reshape(-1)[5] = np.nan
    gguf_file(tmp_path / "m.gguf", tensors={f"{stored}.weight": values})
    with pytest.raises(SourceError, match=rf"'{stored}\.weight' of .*m\.gguf .* not finite"):
        opened(tmp_path / "m.gguf").tensor(f"{name}.weight")


def test_the_library_can_dequantize_what_is_published():
    names = {kind.name for kind in Q if _can_dequantize(kind)}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
                     "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
                     "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"}


def test_a_table_of_ones_changes_nothing(tmp_path, gguf_file):
    gguf_file(tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    scaling = opened(tmp_path / "m.gguf").config()["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 1.0)


def test_the_config_is_a_copy(tmp_path, gguf_file):
    gguf_file(tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    source = opened(tmp_path / "m.gguf")
    source.config()["rope_scaling"]["factor"] = 3
    assert source.config()["rope_scaling"]["factor"] == 1.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory, gguf_file):
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    gguf_file(path, layers=1, ffn=32, tensors={"rope_freqs.weight": np.ones(4, np.float32)},
              types={"blk.0.ffn_up.weight": Q.Q8_0})
    return path.read_bytes(), min(t.offset for t in open_gguf(path)[0].tensors.values())


@pytest.mark.filterwarnings("ignore:.*how its model cuts text")
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.sampled_from("xxid")),
                min_size=1, max_size=3))
def test_a_mutated_model_is_read_whole_or_refused(tmp_path_factory, whole, edits):
    content, header = whole
    raw = bytearray(content)
    for where, byte, how in edits:
        at = int(where * header)
        raw[at:at + (how != "i")] = b"" if how == "d" else bytes([byte])
    path = tmp_path_factory.mktemp("m") / "x.gguf"
    path.write_bytes(raw)
    try:
        source = opened(path)
        for name, info in source.tensors().items():
            assert source.tensor(name).shape == info.shape
        assert "tokenizer.json" in source.side_files()
    except SourceError as error:
        assert "x.gguf" in error.what


def test_opening(tmp_path, gguf_file):
    path = tmp_path / "M.GGUF"
    gguf_file(path)
    assert KIND.matches(str(path)) and not KIND.matches("pkg:x.gguf") and not KIND.matches(str(tmp_path))
    source = open_source(str(path))
    assert isinstance(source, GGUFSource) and source.uri == str(path)
    identity = source.identity()
    assert (identity.kind, identity.pinned, len(identity.files["M.GGUF"])) == ("gguf", False, 64)
    assert set(source.side_files()) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    for uri, what in ((tmp_path / "none.gguf", "doesn't exist"), ("a" * 5000 + ".gguf", "doesn't exist"),
                      ("~nobody-at-all/x.gguf", "doesn't exist"), ("a\0.gguf", "doesn't exist")):
        with pytest.raises(SourceError, match=what):
            KIND.open(str(uri), None)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(SourceError, match="is not a file"):
        KIND.open(str(tmp_path / "folder.gguf"), None)
    with pytest.raises(SourceError, match="revision"):
        KIND.open(str(path), "main")


@pytest.mark.oracle
def test_weights_are_those_of_transformers_own_reading(tmp_path, gguf_file):
    """transformers turns a GGUF into a Llama by its own code; both must be the same model."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    gguf_file(tmp_path / "m.gguf", tied=False, layers=1)
    ours = opened(tmp_path / "m.gguf")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**ours.config()))
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)
    assert theirs["tensors"].keys() == ours.tensors().keys()
    for name, value in theirs["tensors"].items():
        assert torch.equal(ours.tensor(name), torch.as_tensor(value).bfloat16()), name


def test_the_real_model(smollm2):
    source = open_source(smollm2)
    config = source.config()
    wanted = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30,
              "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 9,
              "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000,
              "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    assert {key: config[key] for key in wanted} == wanted
    assert {n: i.shape for n, i in source.tensors().items()} == tensor_shapes(parse_config(config))
    header, data = open_gguf(source.path)
    for part, heads in (("q", 9), ("k", 3)):
        tensor = header.tensors[f"blk.17.attn_{part}.weight"]
        assert tensor.type == Q.Q4_1
        values = q4_1(data[tensor.offset:tensor.offset + tensor.nbytes]).reshape(tensor.shape)
        wanted_rows = torch.from_numpy(rotate_half_order(values, heads)).bfloat16()
        assert torch.equal(source.tensor(f"model.layers.17.self_attn.{part}_proj.weight"), wanted_rows)


def q4_1(raw: bytes) -> np.ndarray:
    """Blocks of 32: a half scale, a half minimum, low nibbles first, then the high ones."""
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]))
    codes = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], 1).astype(np.float32)
    return codes * blocks["d"].astype(np.float32)[:, None] + blocks["m"].astype(np.float32)[:, None]


def test_how_the_file_keeps_its_tensors_and_how_many_bytes_it_has(tmp_path, gguf_file):
    gguf_file(tmp_path / "m.gguf", types={"blk.0.ffn_up.weight": Q.Q8_0, "blk.0.attn_q.weight": Q.Q4_1})
    with closing(open_source(str(tmp_path / "m.gguf"))) as source:
        stored = stored_tensors(source)
        assert stored.keys() == source.tensors().keys()
        assert stored["model.layers.0.mlp.up_proj.weight"].type == "Q8_0"
        assert 8 * stored["model.layers.0.self_attn.q_proj.weight"].nbytes == 5 * math.prod(
            source.tensors()["model.layers.0.self_attn.q_proj.weight"].shape)
        assert stored["model.norm.weight"].type == "F32"
        assert set(quantized_types(source)) == {"Q8_0", "Q4_1"}
        assert file_bytes(source) == (tmp_path / "m.gguf").stat().st_size
        # its head by itself is the embedding's bytes, and adds none to the file
        untied = ResolvedHeadSource(source, tied=False)
        assert file_bytes(untied) == file_bytes(source)
        assert stored_tensors(untied)["lm_head.weight"] == stored["model.embed_tokens.weight"]


@pytest.mark.parametrize(("kind", "what"), [
    ("imatrix", "is an importance matrix, not a model"), ("adapter", "is an adapter, not a model"),
    ("mmproj", "reads images with, not a model")])
def test_other_files_are_called_what_they_are(tmp_path, kind, what):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((2, 32), np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with pytest.raises(SourceError, match=what) as caught:
        open_source(str(tmp_path / "x.gguf"))
    assert caught.value.next
