"""gpt-oss's files as a source of single experts: each tensor its part of the file's, read alone; and refused
where the parts can't be told apart."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.runtime.loader import load
from quantkit.sources.base import TensorInfo, in_file
from quantkit.sources.open import open_source
from quantkit.sources.split_experts import split_experts
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_model
from quantkit.testing.tiny import tiny_config, tiny_weights

PLACE = "model.layers.1.mlp.experts"


@pytest.fixture
def folder(tmp_path):
    return tiny_model(tmp_path / "m", "gpt_oss", intermediate_size=96, dtype="float32")


def test_every_tensor_is_the_part_of_the_files_that_it_names(folder):
    stored = load_file(folder / "model.safetensors")
    assert stored[f"{PLACE}.gate_up_proj"].shape == (4, 64, 192), "as transformers has it"
    source = open_source(str(folder))
    assert {name: info.shape for name, info in source.tensors().items()} == tensor_shapes(
        parse_config(source.config()))
    for name, expected in tiny_weights(tiny_config("gpt_oss", dtype="float32", intermediate_size=96)).items():
        tensor = source.tensor(name)
        assert torch.equal(tensor, expected) and tensor.is_contiguous(), name
    up = source.tensor(f"{PLACE}.2.up_proj.weight")
    assert torch.equal(up, stored[f"{PLACE}.gate_up_proj"][2, :, 1::2].T)
    assert up.untyped_storage().nbytes() == up.nbytes, "no other expert is kept in memory"
    source.prefetch([f"{PLACE}.2.up_proj.weight", "model.norm.weight"])
    source.release()
    with pytest.raises(SourceError, match="no tensor"):
        source.tensor(f"{PLACE}.gate_up_proj")
    source.close()


class Listed:
    """A source of names and shapes alone."""

    uri = "listed"

    def __init__(self, shapes, count):
        self._shapes, self._count = shapes, count

    def config(self):
        return {"model_type": "gpt_oss", "num_local_experts": self._count}

    def tensors(self):
        return {name: TensorInfo(name, shape, torch.uint8) for name, shape in self._shapes.items()}


@pytest.mark.parametrize(("shapes", "count"), [
    ({f"{PLACE}.gate_up_proj": (4, 64, 191)}, 4), ({f"{PLACE}.gate_up_proj": (4, 64)}, 4),
    ({f"{PLACE}.gate_up_proj_bias": (4, 3)}, 4), ({f"{PLACE}.down_proj_blocks": (4, 64, 2)}, 4),
    ({f"{PLACE}.down_proj": (5, 64, 64)}, 4), ({f"{PLACE}.down_proj": (1 << 30, 0, 0)}, 1 << 30),
    ({f"{PLACE}.down_proj": (4, 64, 64)}, "4"), ({f"{PLACE}.down_proj": (1, 64, 64)}, True),
    ({f"{PLACE}.down_proj": (4, 64, 64)}, None), ({f"{PLACE}.down_proj": ()}, 4),
    ({f"model.layers.{i}.mlp.experts.down_proj": (4096, 0, 0) for i in range(400)}, 4096),
    ({f"{PLACE}.down_proj": (4, 64, 64), f"{PLACE}.3.down_proj.weight": (64, 64)}, 4)],
    ids=lambda value: str(value)[:60])
def test_shapes_that_cannot_be(shapes, count):
    with pytest.raises(SourceError) as caught:
        split_experts(Listed(shapes, count))
    assert caught.value.why and caught.value.next


def test_names_that_are_none_of_experts_stay(folder):
    shapes = {"model.layers.00.mlp.experts.down_proj": (4, 2, 2), f"{PLACE}.down_proj_other": (4, 2),
              f"{PLACE}.down_proj": (4, 2, 6)}
    assert list(split_experts(Listed(shapes, 4)).tensors()) == [
        *list(shapes)[:2], *(f"{PLACE}.{number}.down_proj.weight" for number in range(4))]


def test_a_config_of_other_shapes_is_an_error(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(SourceError, match="doesn't hold the model"):
        load(str(folder))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.sinks"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="doesn't hold the model") as caught:
        load(str(folder))
    assert "self_attn.sinks" in caught.value.why


@pytest.mark.parametrize(("model_type", "transposed"), [
    ("qwen3_5_moe", False), ("gemma4_text", False), ("llama4", True)])
def test_other_families_lie_as_theirs_do(model_type, transposed, tmp_path):
    gate_up, down = torch.randn(3, 10, 8), torch.randn(3, 8, 5)
    place = "model.language_model.layers.0.mlp.experts"
    file = {f"{place}.gate_up_proj": gate_up, f"{place}.down_proj": down,
            "model.visual.experts.down_proj": down.clone()}
    save_file({name: (tensor.transpose(1, 2) if transposed else tensor).contiguous()
               for name, tensor in file.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": model_type, "text_config": {"num_experts": 3}}))
    source = open_source(str(tmp_path))
    for expert in range(3):
        for name, expected in (("gate_proj", gate_up[expert, :5]), ("up_proj", gate_up[expert, 5:]),
                               ("down_proj", down[expert])):
            name = f"{place}.{expert}.{name}.weight"
            assert source.tensors()[name].shape == expected.shape
            assert torch.equal(source.tensor(name), expected)
    assert "model.visual.experts.down_proj" in source.tensors(), "those of a tower stay together"
    again = in_file(source, {name: source.tensor(name) for name in reversed(source.tensors())})
    assert again.keys() == file.keys()
    assert all(torch.equal(again[name], load_file(tmp_path / "model.safetensors")[name]) for name in file)
    source.close()


def test_granites_are_called_linears(tmp_path):
    place = "model.layers.0.block_sparse_moe"
    file = {f"{place}.input_linear.weight": torch.randn(3, 10, 8),
            f"{place}.output_linear.weight": torch.randn(3, 8, 5),
            "model.layers.0.shared_mlp.input_linear.weight": torch.randn(10, 8)}
    save_file(file, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granitemoehybrid",
                                                      "num_local_experts": 3}))
    source = open_source(str(tmp_path))
    assert torch.equal(source.tensor(f"{place}.experts.2.up_proj.weight"),
                       file[f"{place}.input_linear.weight"][2, 5:])
    assert torch.equal(source.tensor(f"{place}.experts.1.down_proj.weight"),
                       file[f"{place}.output_linear.weight"][1])
    again = in_file(source, {name: source.tensor(name) for name in source.tensors()})
    assert again.keys() == file.keys() and all(torch.equal(again[name], file[name]) for name in file)
    source.close()


def test_experts_of_unknown_layout_stay_together(tmp_path):
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 10, 8)}
    save_file(fused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "num_experts": 3}))
    source = open_source(str(tmp_path))
    assert source.tensors().keys() == fused.keys()
    source.close()


@pytest.mark.parametrize("turned", [False, True])
def test_a_family_that_has_either_is_told_by_the_shapes(turned, tmp_path):
    place = "model.language_model.layers.0.mlp.experts"
    gate_up, down = torch.randn(3, 10, 8), torch.randn(3, 8, 5)
    save_file({f"{place}.{name}": (tensor.transpose(1, 2) if turned else tensor).contiguous()
               for name, tensor in (("gate_up_proj", gate_up), ("down_proj", down))},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": {
        "num_experts": 3, "hidden_size": 8, "moe_intermediate_size": 5}}))
    source = open_source(str(tmp_path))
    assert torch.equal(source.tensor("model.layers.0.mlp.experts.2.up_proj.weight"), gate_up[2, 5:])
    assert torch.equal(source.tensor("model.layers.0.mlp.experts.1.down_proj.weight"), down[1])
    stored = load_file(tmp_path / "model.safetensors")
    again = in_file(source, {name: source.tensor(name) for name in source.tensors()})
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    source.close()
