from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.durable import hash_file
from quantkit.checkpoint.manifest import FileRecord, Manifest
from quantkit.export.layouts import export
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError


def forge(folder, **records):
    """Rewrite the manifest so that it agrees with files that were changed on purpose."""
    manifest = Manifest.from_bytes((folder / "quantkit.json").read_bytes())
    files = dict(manifest.files)
    for name in files:
        digest, size = hash_file(folder / name)
        files[name] = FileRecord(sha256=digest, bytes=size)
    changed = manifest.model_copy(update={"files": files} | records)
    (folder / "quantkit.json").write_bytes(changed.to_bytes())


def test_a_good_checkpoint_passes(written):
    folder, *_ = written
    report = verify(folder)
    assert report.ok, report.failed
    names = {check.name for check in report.checks}
    assert {"model.safetensors", "config.json", "structure", "values", "quantkit.json"} <= names
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_one_flipped_bit_names_its_file(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    random = torch.Generator().manual_seed(1)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        places = {0, len(good) - 1, *torch.randint(len(good), (6,), generator=random).tolist()}
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 1 << (place % 8)
            file.write_bytes(bad)
            report = verify(folder)
            assert not report.ok and report.failed[0].name == file.name, (file.name, place)
        file.write_bytes(good)
    assert verify(folder).ok


def test_a_missing_or_cut_file_is_named(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    (folder / "tokenizer.json").unlink()
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-1])
    failed = {check.name: check.detail for check in verify(folder).failed}
    assert failed.keys() == {"tokenizer.json", "model.safetensors"}
    assert f"{len(raw) - 1:,} bytes" in failed["model.safetensors"]


def test_a_file_that_nobody_listed_is_noted(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    report = verify(folder)
    assert report.ok
    assert [c.detail for c in report.checks if c.name == "unknown files"] == ["modeling_evil.py"]


@pytest.mark.parametrize("suffix, value, said", [
    ("weight_scale", float("inf"), "not finite"), ("weight_shape", 7, "weight_shape says")])
def test_wrong_values_are_found_even_when_all_hashes_agree(tiny, tmp_path, rules, suffix, value, said):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{suffix}"].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    forge(folder)
    (fault,) = verify(folder).failed
    assert fault.name == "values" and said in fault.detail
    assert fault.detail.startswith("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_of_nan_is_found(tiny, tmp_path, rules, code):
    folder = tiny.write(tmp_path / "out", *rules["fp8"])
    assert verify(folder).ok
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8).view(-1)[5] = code
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    forge(folder)
    (fault,) = verify(folder).failed
    assert fault.name == "values" and fault.detail.startswith("model.layers.0.mlp.up_proj: ")
    assert "not finite" in fault.detail


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight",
                                  "model.norm.weight", "lm_head.weight"])
def test_what_is_not_quantized_is_checked_wherever_it_is_read(tiny, tmp_path, rules, name):
    folder, bad = tiny.write(tmp_path / "out", *rules["int4"]), f"tensor {name!r} of "
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    forge(folder)
    (fault,) = verify(folder).failed
    assert fault.name == "values" and fault.detail.startswith(bad) and "not finite" in fault.detail
    for read in (lambda: load(str(folder)), lambda: export(str(folder), "gptq", tmp_path / "gptq")):
        with pytest.raises(CheckpointError, match="not finite") as caught:
            read()
        assert caught.value.what.startswith(bad)
        assert caught.value.next.startswith(f"quantkit verify {folder} finds all damage")
    assert not (tmp_path / "gptq").exists()


def test_a_tensor_that_is_not_finite_is_never_published(tiny, tmp_path, rules):
    tiny.source.weights["model.norm.weight"][3] = float("inf")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' of .* not finite"):
        tiny.write(tmp_path / "out", *rules["int4"])
    assert not (tmp_path / "out").exists()


def test_a_config_that_says_otherwise_is_found(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    forge(folder)
    assert [c.name for c in verify(folder).failed] == ["config.json and quantkit.json"]


def test_a_structure_that_says_otherwise_is_found(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    forge(folder)
    (fault,) = verify(folder).failed
    assert fault.name == "structure" and "up_proj.weight_scale" in fault.detail and "missing" in fault.detail


def test_what_is_no_checkpoint_raises(tmp_path):
    with pytest.raises(CheckpointError, match="no quantkit checkpoint"):
        verify(tmp_path)
