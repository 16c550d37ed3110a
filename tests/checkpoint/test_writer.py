from __future__ import annotations

import hashlib
import json
import sys

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter, natural, refuse_existing
from quantkit.support.errors import CheckpointError
from tests.helpers.folders import contents


def test_the_same_run_twice_is_byte_identical_and_leaves_nothing_else(tiny, tmp_path, rules):
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "deep").mkdir(parents=True)
    one = tiny.write(tmp_path / "a" / "out", *rules["int4"])
    two = tiny.write(tmp_path / "b" / "deep" / "out", *rules["int4"])
    assert contents(one) == contents(two)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]
    for name, raw in contents(one).items():
        assert str(tmp_path).encode() not in raw and b"private" not in raw, name


def test_units_survive_the_process_and_come_back(tiny, tmp_path, rules):
    plan = tiny.plan(*rules["int4"])
    units = tiny.units(plan)
    tensors, rows = units["model.layers.1"]
    with CheckpointWriter(tmp_path / "out", {"a": 1}) as writer:
        assert not writer.has("model.layers.1")
        writer.put("model.layers.1", tensors, rows)
    with CheckpointWriter(tmp_path / "out", {"a": 1}) as writer:
        assert writer.units() == ["model.layers.1"] and writer.has("model.layers.1")
        found, found_rows = writer.get("model.layers.1")
        assert found_rows == rows and found.keys() == tensors.keys()
        assert all(torch.equal(found[n], t) for n, t in tensors.items())
        with pytest.raises(CheckpointError, match=r"'model\.layers\.0' is not in"):
            writer.get("model.layers.0")


def test_a_damaged_unit_counts_as_missing(tiny, tmp_path, rules):
    tensors, rows = tiny.units(tiny.plan(*rules["int4"]))["rest"]
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        writer.put("rest", tensors, rows)
    part = tmp_path / "out.partial" / "part-rest.safetensors"
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        assert not writer.has("rest")
        with pytest.raises(CheckpointError, match="damaged"):
            writer.finish({}, {}, tiny.manifest(tiny.plan(*rules["int4"])))


def test_another_runs_folder_is_refused_with_the_difference(tmp_path):
    with CheckpointWriter(tmp_path / "out", {"recipe": {"rules": [{"bits": 4}]}, "source": "x"}):
        pass
    with pytest.raises(CheckpointError) as caught:
        CheckpointWriter(tmp_path / "out", {"recipe": {"rules": [{"bits": 8}]}, "source": "x"})
    assert "recipe: rules[0].bits: 4 → 8" in str(caught.value)
    assert "source" not in caught.value.why
    assert "rm -r" in caught.value.next and "out.partial" in caught.value.next


@pytest.mark.parametrize("make", ["mkdir", "touch"])
def test_an_existing_out_is_refused_before_any_work(tmp_path, make):
    getattr(tmp_path / "out", make)()
    with pytest.raises(CheckpointError, match="already exists") as caught:
        CheckpointWriter(tmp_path / "out", {})
    assert "choose another --out" in caught.value.next
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_out_that_appears_meanwhile_is_not_written_over(tiny, tmp_path, rules):
    plan = tiny.plan(*rules["int4"])
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        for unit, (tensors, rows) in tiny.units(plan).items():
            writer.put(unit, tensors, rows)
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointError, match="already exists"):
            writer.finish(tiny.source.config(), {}, tiny.manifest(plan))


def test_a_strangers_folder_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a quantkit run's folder"):
        CheckpointWriter(tmp_path / "out", {})
    assert (tmp_path / "out.partial" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("names", [["finished"], ["finished", "thesis.txt"], ["lock", "thesis.txt"],
                                   ["part-a.json"], ["checkpoint"], ["state.json", "thesis.txt"],
                                   ["x.tmp"]])
def test_a_folder_that_no_run_made_stays_as_it_is(tmp_path, names):
    folder = tmp_path / "out.partial"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("years of work")
    with pytest.raises(CheckpointError, match="not a quantkit run's folder") as caught:
        CheckpointWriter(tmp_path / "out", {})
    assert "rm -r" not in caught.value.next
    assert contents(folder) == dict.fromkeys(sorted(names), b"years of work")


def test_what_a_run_did_not_make_outlives_it(tiny, tmp_path, rules):
    plan = tiny.plan(*rules["int4"])
    with CheckpointWriter(tmp_path / "out", {"a": 1}):
        pass
    folder = tmp_path / "out.partial"
    for name in ("thesis.txt", "thesis.tmp"):
        (folder / name).write_text("years of work")
    with pytest.raises(CheckpointError, match="belongs to another run") as caught:
        CheckpointWriter(tmp_path / "out", {"a": 2})
    assert "rm -r" not in caught.value.next
    with CheckpointWriter(tmp_path / "out", {"a": 1}) as writer:
        for unit, (tensors, rows) in tiny.units(plan).items():
            writer.put(unit, tensors, rows)
        writer.finish(tiny.source.config(), {}, tiny.manifest(plan))
    assert contents(folder) == dict.fromkeys(["thesis.tmp", "thesis.txt"], b"years of work")


@pytest.mark.parametrize("out, why", [("/", "a name"), ("x.partial", "a name"), ("", "empty"),
                                      ("~nobody-of-that-name/x", "home"), ("loop", "loop"),
                                      ("x" * 300, "too long")])
def test_bad_names_for_out(tmp_path, monkeypatch, out, why):
    monkeypatch.chdir(tmp_path)
    if out == "loop":
        (tmp_path / "loop").symlink_to("loop")
    before = list(tmp_path.iterdir())
    for ask in (refuse_existing, lambda out: CheckpointWriter(out, {})):
        with pytest.raises(CheckpointError) as caught:
            ask(out)
        if out != "loop" or sys.version_info < (3, 13):  # later ones take it for a name
            assert "can't be a checkpoint's folder" in caught.value.what
            assert why in caught.value.why
        assert caught.value.next.startswith("choose another --out")
    assert list(tmp_path.iterdir()) == before


def test_only_a_checkpoint_that_nobody_is_in_is_advised_to_be_removed(tmp_path, monkeypatch):
    def advice(out, source=None):
        with pytest.raises(CheckpointError, match="already exists") as caught:
            refuse_existing(out, source)
        return caught.value.next

    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    assert advice(out) == "choose another --out"
    (out / "quantkit.json").touch()
    assert advice(out, "owner/name") == f"choose another --out, or remove it: rm -r {out}"
    assert advice(out, str(out)) == advice(out, str(out / "deep")) == "choose another --out"
    monkeypatch.chdir(out / "deep")
    assert advice("..") == advice(out) == "choose another --out"
    monkeypatch.chdir(out)
    assert advice(".") == "choose another --out"


@pytest.mark.parametrize("unit", ["", "../x", "a/b", ".hidden", "a b", "x" * 200])
def test_a_unit_is_a_plain_name(tmp_path, unit):
    with CheckpointWriter(tmp_path / "out", {}) as writer, pytest.raises(CheckpointError):
        writer.put(unit, {}, [])


def test_too_little_space_is_said_before_any_work(tmp_path):
    with pytest.raises(CheckpointError, match="doesn't fit") as caught:
        CheckpointWriter(tmp_path / "deep" / "out", {}, needed_bytes=10**18)
    assert "free" in caught.value.why and not list(tmp_path.iterdir())


def test_shards_split_in_order_with_an_index(tiny, tmp_path, rules):
    folder = tiny.write(tmp_path / "out", *rules["int4"], shard_bytes=20_000)
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    with Checkpoint.open(folder) as checkpoint:
        assert set(index["weight_map"]) == set(checkpoint.infos)
        assert index["metadata"]["total_size"] == sum(i.nbytes for i in checkpoint.infos.values())
        single = Checkpoint.open(tiny.write(tmp_path / "single", *rules["int4"]))
        for name in checkpoint.infos:
            assert torch.equal(checkpoint.tensor(name), single.tensor(name))


def test_the_manifest_lists_every_other_file_with_its_hash(written):
    folder, *_ = written
    with Checkpoint.open(folder) as checkpoint:
        listed = {n: r.sha256 for n, r in checkpoint.manifest.files.items()}
    assert listed == {n: hashlib.sha256(raw).hexdigest() for n, raw in contents(folder).items()
                      if n != "quantkit.json"}


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "config.json", "quantkit.json", "x.safetensors", "README.md"])
def test_side_files_are_plain_names_of_their_own(tiny, tmp_path, rules, name):
    plan = tiny.plan(*rules["int4"])
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        for unit, (tensors, rows) in tiny.units(plan).items():
            writer.put(unit, tensors, rows)
        with pytest.raises(CheckpointError, match="can't be copied"):
            writer.finish(tiny.source.config(), {name: b""}, tiny.manifest(plan))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_never_published(tiny, tmp_path, rules, value):
    plan = tiny.plan(*rules["int4"])
    units = tiny.units(plan)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    units["model.layers.1"][0][name].view(-1)[7] = value
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        for unit, (tensors, rows) in units.items():
            writer.put(unit, tensors, rows)
        with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj: .*weight_scale' of .* not finite"):
            writer.finish(tiny.source.config(), {}, tiny.manifest(plan))
    assert not (tmp_path / "out").exists()


def test_a_tensor_in_two_units_is_refused(tiny, tmp_path, rules):
    plan = tiny.plan(*rules["int4"])
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        for unit, (tensors, rows) in tiny.units(plan).items():
            writer.put(unit, {**tensors, "again": torch.zeros(1)}, rows)
        with pytest.raises(CheckpointError, match="tensor again is in two units"):
            writer.finish(tiny.source.config(), {}, tiny.manifest(plan))


def test_units_are_ordered_as_people_count():
    assert sorted(["l.10", "l.9", "rest", "l.1"], key=natural) == ["l.1", "l.9", "l.10", "rest"]
