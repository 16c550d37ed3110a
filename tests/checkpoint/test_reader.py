from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.reader import Checkpoint, is_checkpoint
from quantkit.plugins.manager import registry
from quantkit.runtime.verify import verify
from quantkit.sources.causal_lm import resolve_head
from quantkit.support.errors import CheckpointError


def test_what_was_written_is_read_back_bit_for_bit(written):
    folder, tiny, rules = written
    plan = tiny.plan(*rules)
    with Checkpoint.open(folder) as checkpoint:
        units = tiny.units(plan)
        expected = {n: t for tensors, _ in units.values() for n, t in tensors.items()}
        assert set(checkpoint.infos) == set(expected)
        for name, tensor in expected.items():
            found = checkpoint.tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for row in plan.rows:
            packed = checkpoint.quantized(row.name)
            assert (packed is None) == (row.method is None)
            if packed is not None:
                assert packed.nbytes == row.bytes_after  # the plan's bytes are exact
                weight = registry("formats").get(row.format).dequantize(packed)
                original = tiny.source.tensor(f"{row.name}.weight").float()
                assert (weight - original).norm() / original.norm() < 0.4
        assert dict(checkpoint.side_files()) == tiny.source.side_files()
        assert checkpoint.manifest.bits_per_weight == pytest.approx(plan.bits_per_weight)
        weights = sum(t.numel() * t.element_size() for t in expected.values())
        assert weights == plan.disk_bytes
        assert weights < checkpoint.file_bytes < weights + 20_000


def test_rows_follow_the_model(written):
    folder, tiny, rules = written
    with Checkpoint.open(folder) as checkpoint:
        assert [r.name for r in checkpoint.manifest.layers] == [r.name for r in tiny.plan(*rules).rows]


def test_unknown_layer_and_kept_layer_are_not_quantized(tiny, tmp_path, rules):
    with Checkpoint.open(tiny.write(tmp_path / "out", *rules["int4"])) as checkpoint:
        assert checkpoint.quantized("lm_head") is None
        assert checkpoint.quantized("nothing") is None
        assert checkpoint.has("lm_head.weight") and not checkpoint.has("nothing")


def test_tied_embeddings_are_stored_once(make_tiny, tmp_path, rules):
    tiny = make_tiny(tied=True)
    tiny.source.weights["lm_head.weight"] = tiny.source.weights["model.embed_tokens.weight"]
    tiny.source = resolve_head(tiny.source)
    optional = [{**rules["int4"][0], "optional": True}, rules["int4"][1]]
    with Checkpoint.open(tiny.write(tmp_path / "out", *optional)) as checkpoint:
        assert not checkpoint.has("lm_head.weight")
        assert checkpoint.config()["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize("damage, said", [
    (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    (lambda f: (f / "tokenizer.json").write_bytes(b"{}"), "tokenizer.json is damaged"),
    (lambda f: (f / "quantkit.json").write_text("{}"), "quantkit.json is damaged"),
    (lambda f: (f / "quantkit.json").unlink(), "has no quantkit.json"),
    (lambda f: (f / "quantkit.json").write_text('{"schema_version": 2}'), "schema version 2"),
    (lambda f: f.rename(f.with_name("x.partial")).rename(f).joinpath("state.json").write_text("{}")
        and (f / "quantkit.json").unlink(), "unfinished"),
])
def test_damage_is_met_at_open(tiny, tmp_path, rules, damage, said):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    damage(folder)
    assert is_checkpoint(folder)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert said in str(caught.value) and caught.value.next


@pytest.mark.parametrize(("plugins", "why", "then"), [
    ({"quantkit": "1", "quantkit-odd": "3"}, "made with quantkit-odd 3", "pip install quantkit-odd"),
    ({"quantkit": "1"}, "no plugin that made it is named", "quantkit plugins list")])
def test_a_format_that_is_not_installed_says_what_to_install(tiny, tmp_path, rules, plugins, why, then):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    manifest = Checkpoint.open(folder).manifest
    rows = tuple(row.model_copy(update={"format": "odd"}) if row.format else row for row in manifest.layers)
    changed = manifest.model_copy(update={"layers": rows, "plugins": plugins})
    (folder / "quantkit.json").write_bytes(changed.to_bytes())
    with pytest.raises(CheckpointError, match="layers of the format 'odd', which isn't installed") as caught:
        Checkpoint.open(folder)
    assert why in caught.value.why and caught.value.next.startswith(then)


def test_a_layer_of_another_layout_is_refused(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    manifest = Checkpoint.open(folder).manifest
    rows = list(manifest.layers)
    rows[0] = rows[0].model_copy(update={"spec": rows[0].spec.model_copy(update={"bits": 5})})
    (folder / "quantkit.json").write_bytes(manifest.model_copy(update={"layers": tuple(rows)}).to_bytes())
    with pytest.raises(CheckpointError, match=r"q_proj.weight_packed of .* is torch.int32 \[64, 8\]"):
        Checkpoint.open(folder)


def test_another_tools_checkpoint_is_named_as_such(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert is_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="quant_method 'awq'"):
        Checkpoint.open(tmp_path)


def test_a_plain_model_is_no_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is no quantkit checkpoint"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        Checkpoint.open(tmp_path / "nothing")


def test_a_checkpoint_inside_a_writers_folder_is_unfinished(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    parent = tmp_path / "again.partial"
    parent.mkdir()
    shutil.move(folder, parent / "checkpoint")
    Checkpoint.open(parent / "checkpoint").close()
    (parent / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="unfinished"):
        Checkpoint.open(parent / "checkpoint")


def test_an_edited_model_card_is_read_and_reported(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    (folder / "README.md").write_text("my own words")
    Checkpoint.open(folder).close()
    assert [check.name for check in verify(folder).failed] == ["README.md"]


def test_weights_smuggled_in_beside_the_listed_ones_are_refused(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"])
    shutil.copy(folder / "model.safetensors", folder / "evil.safetensors")
    with Checkpoint.open(tiny.write(tmp_path / "good", *rules["int4"])) as good:
        index = {"weight_map": dict.fromkeys(good.infos, "evil.safetensors")}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = Manifest.from_bytes((folder / "quantkit.json").read_bytes())
    files = {n: r for n, r in manifest.files.items() if n != "model.safetensors"}
    (folder / "quantkit.json").write_bytes(manifest.model_copy(update={"files": files}).to_bytes())
    with pytest.raises(CheckpointError, match=r"would be read from evil\.safetensors"):
        Checkpoint.open(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2**20, 63 * 2**20])
def test_a_config_of_many_values_takes_little_memory(tmp_path, size):
    (tmp_path / "config.json").write_bytes(b'{"a": [' + b"{}," * (size // 3) + b"{}]}")
    code = ("import resource, sys; from quantkit.checkpoint.reader import is_checkpoint\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
            "before = peak(); assert not is_checkpoint(sys.argv[1]); print(peak() - before)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True,
                          timeout=120, check=True)
    assert int(done.stdout) < 256 * 2**20
