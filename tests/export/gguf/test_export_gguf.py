"""A checkpoint as one GGUF file: the tensors in it, where it comes from, and what is left when it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections import namedtuple

import gguf.quants
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.open import open_checkpoint
from quantkit.export.gguf import export as module
from quantkit.export.gguf.export import export_gguf
from quantkit.export.gpt_oss import export_gpt_oss
from quantkit.export.layouts import InexactError
from quantkit.plugins.manager import registry
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.sources.gguf import GGUFSource
from quantkit.support.errors import (
    CheckpointError,
    QuantkitError,
    SpecError,
    UnsupportedModelError,
    UsageError,
)
from quantkit.testing import FAMILIES, tiny_model

INT8 = "{bits: 8, granularity: {strategy: group, size: 32}}"
MIXED = """name: mixed
rules:
  - {{match: '*.1.*v_proj', method: rtn, spec: {{bits: 4, granularity: {{strategy: group, size: 64}}}}}}
  - {{match: '*.0.*k_proj', method: rtn, format: gguf-q4_1,
      spec: {{bits: 4, symmetric: false, minimum: true, granularity: {{strategy: group, size: 32}}}}}}
  - {{match: '*.0.*o_proj', method: rtn, spec: {{bits: 3, granularity: {{strategy: channel}}}}}}
  - {{match: '*.1.*o_proj'}}
  - {{match: 'model.embed_tokens', method: rtn, spec: {int8}}}
  - {{match: '*', method: rtn, spec: {int8}}}
"""
GGUF_FAMILIES = sorted(set(FAMILIES) - {"mimo", "internlm3", "iquestcoder", "ministral", "qwen2_moe"})
UNTIED = {"tie_word_embeddings": False}
ALL_INT8 = f"rules:\n  - {{match: '*', method: rtn, spec: {INT8}}}\n"


def made(folder, family="llama", recipe=ALL_INT8, **overrides):
    folder.mkdir(parents=True, exist_ok=True)
    source = tiny_model(folder / "model", family, **overrides)
    (folder / "recipe.yaml").write_text(recipe)
    return quantize(str(source), str(folder / "recipe.yaml"), folder / "checkpoint").out


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)


def weights(folder) -> dict[str, torch.Tensor]:
    """Every tensor's values as the checkpoint means them, float32, by Hugging Face name."""
    values = {}
    with open_checkpoint(folder) as opened:
        for name in opened.infos:
            if name.endswith((".weight", ".bias", ".sinks")):
                values[name] = opened.tensor(name).float()
        for row in opened.layers:
            if (packed := opened.quantized(row.name)) is not None:
                values[f"{row.name}.weight"] = registry("formats").get(row.format).dequantize(packed)
    return values


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_every_tensor_comes_back(tmp_path, family):
    recipe = MIXED.format(int8=INT8) if family != "phi3" else ALL_INT8
    checkpoint = made(tmp_path, family, recipe, **(UNTIED if family == "gpt_oss" else {}))
    events = []
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf", progress=events.append)
    source = GGUFSource(result.out, str(result.out))
    wanted = weights(checkpoint)
    assert set(source.tensors()) == set(wanted)
    for name, values in wanted.items():
        assert torch.equal(source.tensor(name), values.to(torch.bfloat16)), name
    assert hashlib.sha256(result.out.read_bytes()).hexdigest() == result.sha256
    assert result.out.stat().st_size == result.bytes
    assert len(result.notes) == (family == "gpt_oss"), result.notes
    assert [path.name for path in tmp_path.iterdir() if "gguf" in path.name] == ["m.gguf"]
    assert {event.phase.name for event in events} == {"checking tensors", "writing tensors"}
    assert events[-1].done == events[-1].total
    ids = torch.randint(4, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    ours, theirs = load(str(checkpoint), dtype="float32"), load(str(result.out), dtype="float32")
    gap = (ours.model(ids) - theirs.model(ids)).abs().flatten()
    assert float(gap.median()) < 0.05  # the source rounds weights to bfloat16
    text = "The in and <s> out"
    assert theirs.tokenizer.encode(text) == ours.tokenizer.encode(text)


def test_types_and_the_exact_values_of_blocks(tmp_path):
    checkpoint = made(tmp_path, recipe=MIXED.format(int8=INT8))
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    kinds = {tensor.name: tensor.kind for tensor in result.tensors}
    expected = {"blk.1.attn_v.weight": "Q4_0", "blk.0.attn_k.weight": "Q4_1",
                "blk.0.attn_output.weight": "Q4_0", "blk.1.attn_output.weight": "BF16",
                "token_embd.weight": "Q8_0", "blk.0.attn_norm.weight": "F32",
                "blk.0.ffn_down.weight": "Q8_0"}
    assert expected.items() <= kinds.items()
    stored = {tensor.name: tensor for tensor in GGUFReader(result.out).tensors}
    for name, place in (("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
                        ("token_embd.weight", "model.embed_tokens.weight"),
                        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight")):
        tensor = stored[name]
        values = gguf.quants.dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        assert torch.equal(torch.from_numpy(values), weights(checkpoint)[place]), name  # nothing is rounded
    with open_checkpoint(checkpoint) as opened:
        blocks = opened.quantized("model.layers.0.self_attn.k_proj").tensors["blocks"]
    order = [head * 16 + side * 8 + i for head in range(2) for i in range(8) for side in range(2)]
    assert torch.equal(torch.from_numpy(stored["blk.0.attn_k.weight"].data.copy()), blocks[order])


FP4 = "{kind: fp, bits: 4, granularity: {strategy: group, size: 32}, scale_dtype: e8m0}"


def test_gpt_oss_in_openai_s_layout_byte_for_byte(tmp_path):
    recipe = f"rules:\n  - {{match: '*.experts.*', method: rtn, spec: {FP4}}}\n  - {{match: '*'}}\n"
    published = export_gpt_oss(str(made(tmp_path, "gpt_oss", recipe, **UNTIED)), tmp_path / "published").out
    result = export_gguf(str(published), tmp_path / "m.gguf")
    stored = {tensor.name: tensor for tensor in GGUFReader(result.out).tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in stored.items()}
    assert kinds["blk.1.ffn_down_exps.weight"] == "MXFP4" and kinds["blk.1.ffn_down_exps.bias"] == "F32"
    assert kinds["blk.1.attn_sinks.weight"] == kinds["blk.1.ffn_gate_inp.weight"] == "F32"
    assert kinds["blk.1.attn_q.weight"] == "BF16"
    theirs = {}
    for file in published.glob("model*.safetensors"):
        theirs |= load_file(file)
    place = "model.layers.1.mlp.experts"
    for part, blocks, scales in (
            ("down", theirs[f"{place}.down_proj_blocks"], theirs[f"{place}.down_proj_scales"]),
            ("gate", theirs[f"{place}.gate_up_proj_blocks"][:, ::2],
             theirs[f"{place}.gate_up_proj_scales"][:, ::2]),
            ("up", theirs[f"{place}.gate_up_proj_blocks"][:, 1::2],
             theirs[f"{place}.gate_up_proj_scales"][:, 1::2])):
        levels = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        expected = torch.cat((scales[..., None], levels[..., :16] | levels[..., 16:] << 4), -1).flatten(2)
        assert torch.equal(torch.from_numpy(stored[f"blk.1.ffn_{part}_exps.weight"].data.copy()), expected)
    ids = torch.randint(4, 300, (1, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = [load(str(path), dtype="float32").model(ids) for path in (published, result.out)]
    assert torch.allclose(*logits, atol=1e-5)
    assert GGUFReader(result.out).fields["general.file_type"].contents() == 38


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kept_weights_keep_their_dtype(tmp_path, dtype):
    rule = f"{{match: '*.0.*down_proj', method: rtn, spec: {INT8}, format: gptq}}"
    recipe = f"rules:\n  - {rule}\n  - {{match: '*'}}\n"
    checkpoint = made(tmp_path, recipe=recipe, dtype=dtype)
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    kinds = {tensor.kind for tensor in result.tensors if len(tensor.shape) == 2}
    assert kinds == {"Q8_0", {"float16": "F16", "float32": "F32"}[dtype]}


def test_the_file_says_where_it_came_from(llama, tmp_path):
    result = export_gguf(str(llama), tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in GGUFReader(result.out).fields.items()}
    manifest = hashlib.sha256((llama / "quantkit.json").read_bytes()).hexdigest()
    assert fields["quantkit.manifest_sha256"] == manifest
    assert fields["quantkit.source"] == "model" and fields["quantkit.quantization.recipe"] == "recipe"
    assert fields["general.name"] == "checkpoint" and fields["general.file_type"] == 7
    assert fields["general.quantization_version"] == 2 and fields["general.architecture"] == "llama"
    assert str(tmp_path) not in str(fields)
    assert export_gguf(str(llama), tmp_path / "again.gguf").sha256 == result.sha256
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["format"] == "gguf" and plain["tensors"][0]["type"] == "BF16"
    assert plain["bytes"] == result.bytes


def test_another_tools_checkpoint(llama, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(llama, theirs)
    (theirs / "quantkit.json").unlink()
    result = export_gguf(str(theirs), tmp_path / "m.gguf")
    fields = GGUFReader(result.out).fields
    assert fields["quantkit.quant_method"].contents() == "compressed-tensors"
    ours, other = export_gguf(str(llama), tmp_path / "ours.gguf"), result
    assert [tensor.kind for tensor in ours.tensors] == [tensor.kind for tensor in other.tensors]


def test_a_phi3_by_name_only(tmp_path):
    """llama.cpp looks for Phi-3's tokens in a model of that name, and fails without them."""
    checkpoint = made(tmp_path, "phi3")
    checkpoint = checkpoint.rename(tmp_path / "my-Phi-3.5-mini")
    fields = GGUFReader(export_gguf(str(checkpoint), tmp_path / "m.gguf").out).fields
    assert fields["general.name"].contents() == "my-Phi 3.5-mini"
    assert module._model_name("my", True) == "my (Phi-3)" and module._model_name("phi3", True) == "phi3"


REFUSED = [
    (f"{{match: '*', method: rtn, spec: {INT8.replace('32', '16')}}}", SpecError, "groups of 16"),
    ("{match: '*', method: rtn, spec: {kind: fp, bits: 8, granularity: {strategy: channel}}}", SpecError,
     "no type for fp8"),
    ("{match: '*', method: rtn, spec: {bits: 8, symmetric: false, granularity: {strategy: channel}}}",
     InexactError, "around its zero points"),
    ("{match: '*.k_proj', method: rtn, format: bnb-int8, spec: {bits: 8, granularity: {strategy: channel}}}\n"
     "  - {match: '*'}", InexactError, "scales that float16"),
]


@pytest.mark.parametrize(("rule", "kind", "words"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_no_type_holds_is_refused_before_anything_is_written(tmp_path, rule, kind, words):
    checkpoint = made(tmp_path, recipe=f"rules:\n  - {rule}\n")
    with pytest.raises(kind) as caught:
        export_gguf(str(checkpoint), tmp_path / "new" / "m.gguf")
    assert words in str(caught.value) and ("recipe" in caught.value.next
                                           or "symmetric" in caught.value.next)
    assert not (tmp_path / "new").exists()


def test_experts_share_a_type(tmp_path):
    recipe = (f"rules:\n  - {{match: '*.experts.1.w1'}}\n  - {{match: '*', method: rtn, spec: {INT8}}}\n")
    checkpoint = made(tmp_path / "kept", "mixtral", recipe)
    with pytest.raises(SpecError, match="experts that no type") as caught:
        export_gguf(str(checkpoint), tmp_path / "m.gguf")
    assert "experts.1.w1 could be BF16" in caught.value.why and not (tmp_path / "m.gguf").exists()
    rule = f"{{match: '*.experts.1.w1', method: rtn, spec: {INT8.replace('8', '4')}}}"
    recipe = f"rules:\n  - {rule}\n  - {{match: '*', method: rtn, spec: {INT8}}}\n"
    checkpoint = made(tmp_path / "mixed", "mixtral", recipe)
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    assert {tensor.kind for tensor in result.tensors if "gate_exps" in tensor.name} == {"Q8_0"}
    source, wanted = GGUFSource(result.out, "m.gguf"), weights(checkpoint)
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    assert torch.equal(source.tensor(name), wanted[name].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_that_is_not_quantized_keeps_its_numbers(tmp_path, dtype):
    plain = tiny_model(tmp_path / "plain", "qwen2", dtype=dtype)
    result = export_gguf(str(plain), tmp_path / "m.gguf")
    kind = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    assert {tensor.kind for tensor in result.tensors} == {"F32", kind}
    source, wanted = GGUFSource(result.out, "m.gguf"), load_file(plain / "model.safetensors")
    for name, tensor in wanted.items():
        assert torch.equal(source.tensor(name), tensor.to(torch.bfloat16)), name
    with pytest.raises(UsageError, match="GGUF file"):
        export_gguf(str(export_gguf(str(made(tmp_path / "q")), tmp_path / "q.gguf").out), tmp_path / "n.gguf")


def test_an_embedding_that_no_type_holds_is_decoded(tmp_path):
    """6 bits with zero points in a scale of bfloat16 fit Q8_0 only where float16 holds the scale."""
    rule = "{bits: 8, symmetric: false, granularity: {strategy: group, size: 64}}"
    recipe = (f"rules:\n  - {{match: model.embed_tokens, method: rtn, spec: {rule}}}\n"
              f"  - {{match: '*', method: rtn, spec: {INT8}}}\n")
    checkpoint = made(tmp_path / "mixed", "llama", recipe)
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    assert {t.name: t.kind for t in result.tensors}["token_embd.weight"] == "BF16"
    name = "model.embed_tokens.weight"
    assert torch.equal(GGUFSource(result.out, "m.gguf").tensor(name), weights(checkpoint)[name].bfloat16())


def test_usage(llama, tmp_path):
    with pytest.raises(UsageError, match=r"must end in \.gguf"):
        export_gguf(str(llama), tmp_path / "out")
    (tmp_path / "there.gguf").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="already exists"):
        export_gguf(str(llama), tmp_path / "there.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="already exists"):
        export_gguf(str(llama), tmp_path / "link.gguf")
    with pytest.raises(UnsupportedModelError, match="mimo"):
        export_gguf(str(made(tmp_path / "mimo", "mimo")), tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damage_is_found(llama, tmp_path, name):
    first = tmp_path / "first"
    shutil.copytree(llama, first)
    data = (first / name).read_bytes()
    at = data.rindex(b"0") if name.endswith(".json") else len(data) - 1
    (first / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    with pytest.raises(CheckpointError, match="damaged"):
        export_gguf(str(first), tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight_scale", "norm.weight", "embed_tokens.weight"])
def test_numbers_that_are_none(llama, tmp_path, name):
    first = tmp_path / "first"
    shutil.copytree(llama, first)
    (first / "quantkit.json").unlink()
    stored = load_file(first / "model.safetensors")
    stored[f"model.{name}"].view(-1)[7] = float("nan")
    save_file(stored, first / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantkitError, match=rf"'model\.{name}' of .* not finite"):
        export_gguf(str(first), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_what_programs_will_do_otherwise(tmp_path):
    checkpoint = made(tmp_path, "mistral", f"kv: int8\n{ALL_INT8}", sliding_window=48)
    notes = export_gguf(str(checkpoint), tmp_path / "m.gguf").notes
    assert len(notes) == 2 and "48" in notes[0] and "KV setting int8" in notes[1]


@pytest.mark.parametrize("when", [2, "blk.1.attn_q.weight"])
def test_ctrl_c_leaves_nothing(llama, tmp_path, stop_at, when):
    with pytest.raises(KeyboardInterrupt):
        export_gguf(str(llama), tmp_path / "out" / "m.gguf", progress=stop_at(when))
    assert not list(tmp_path.rglob("*.gguf*"))


def test_ctrl_c_while_it_is_written(llama, tmp_path):
    def stop(event) -> None:
        if event.phase.name == "writing tensors" and event.done == 5:
            assert (tmp_path / "m.gguf.tmp").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_gguf(str(llama), tmp_path / "m.gguf", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(llama, tmp_path, monkeypatch):
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 9, 1000))
    with pytest.raises(CheckpointError, match="doesn't fit") as caught:
        export_gguf(str(llama), tmp_path / "m.gguf")
    assert "are needed, 1.0 kB are free" in caught.value.why
    monkeypatch.undo()

    def full(path, chunks):
        next(iter(chunks))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(CheckpointError, match="can't be written") as caught:
        export_gguf(str(llama), tmp_path / "m.gguf")
    assert "the file takes" in caught.value.why and "free some space" in caught.value.next
    assert list(tmp_path.iterdir()) == []
