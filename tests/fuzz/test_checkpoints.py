"""Our own checkpoints: the manifest, safetensors files and their index, a run's notes, the side files."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.durable import hash_file
from quantkit.checkpoint.engines import ENGINES, check_engine
from quantkit.checkpoint.open import open_checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.cli.inspect import inspect_facts
from quantkit.models.loadable import check_loadable
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.sources.safetensors_file import SafetensorsFile, ShardedTensors
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.testing import tiny_model
from quantkit.text.tokenizer import Tokenizer

RECIPE = """rules:
  - {match: "*o_proj", method: null}
  - {match: "*down_proj", method: rtn, spec: {bits: 8, granularity: {strategy: channel}, activations: token}}
  - {match: "*", method: rtn, spec: {bits: 4, symmetric: false, granularity: {strategy: group, size: 32}}}
kv: window(64, sinks=4)+int8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoint")
    (place / "r.yaml").write_text(RECIPE)
    return quantize(str(tiny_model(place / "model")), str(place / "r.yaml"), place / "out").out


def _signed(plain: object) -> bytes:
    """A manifest that says what was mutated, with the digest that belongs to it."""
    def canonical(value: object) -> bytes:
        return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode(
            "utf-8", "surrogatepass")

    if not isinstance(plain, dict):
        return canonical(plain)
    return canonical(plain | {"digest": hashlib.sha256(canonical(plain | {"digest": ""})).hexdigest()})


def test_the_manifest(folder, fuzz, mutations):
    def parse(value):
        (folder / "quantkit.json").write_bytes(_signed(value))
        verify(folder)
        with open_checkpoint(folder) as opened:
            check_loadable(str(folder), opened.config(), opened.infos, opened.side_files(), opened.layers,
                           error=CheckpointError)
            for row in opened.layers[:3]:
                opened.quantized(row.name)
            for engine in ENGINES:
                check_engine(engine, opened, "cpu")
        inspect_facts(str(folder))

    original = (folder / "quantkit.json").read_bytes()
    try:
        fuzz(parse, [json.loads(original)], mutations["json"])
    finally:
        (folder / "quantkit.json").write_bytes(original)


def test_the_config_of_a_checkpoint_whose_hashes_agree(folder, fuzz, mutations):
    original = json.loads((folder / "quantkit.json").read_bytes())
    config = (folder / "config.json").read_bytes()

    def parse(value):
        (folder / "config.json").write_bytes(mutations["encode"](value))
        digest, size = hash_file(folder / "config.json")
        files = original["files"] | {"config.json": {"sha256": digest, "bytes": size}}
        (folder / "quantkit.json").write_bytes(_signed(original | {"files": files}))
        report = verify(folder)
        if not report.ok:
            raise QuantkitError(report.failed[0].detail, next="verify says so")
        with open_checkpoint(folder) as opened:
            check_loadable(str(folder), opened.config(), opened.infos, opened.side_files(), opened.layers)
            for engine in ENGINES:
                check_engine(engine, opened, "cpu")
        inspect_facts(str(folder))

    try:
        fuzz(parse, [json.loads(config)], mutations["json"])
    finally:
        (folder / "config.json").write_bytes(config)
        (folder / "quantkit.json").write_bytes(_signed(original))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small safetensors file: header and data."""
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file({"a.weight": torch.ones(3, 4, dtype=torch.bfloat16), "b": torch.arange(5), "c": torch.ones(()),
               "d": torch.empty(0, 2)}, path, metadata={"format": "pt", "note": "x"})
    return path


def _read_all(path):
    opened = SafetensorsFile(path)
    for name in opened.infos:
        opened.tensor(name).clone()
        opened.prefetch(name)
    opened.release()
    opened.close()


def test_the_bytes_of_a_safetensors_file(file, fuzz, mutations, tmp_path):
    def parse(data):
        (tmp_path / "m.safetensors").write_bytes(data)
        _read_all(tmp_path / "m.safetensors")

    fuzz(parse, [file.read_bytes()], mutations["bytes"])


def test_the_header_of_a_safetensors_file(file, fuzz, mutations, tmp_path):
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    data = raw[8 + length:]

    def parse(header):
        text = mutations["encode"](header)
        (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        _read_all(tmp_path / "m.safetensors")

    fuzz(parse, [json.loads(raw[8:8 + length])], mutations["json"])


def test_the_index_of_shards(fuzz, mutations, tmp_path):
    for number in (1, 2):
        save_file({f"t{number}": torch.ones(2)}, tmp_path / f"model-0000{number}-of-00002.safetensors")

    def parse(index):
        (tmp_path / "model.safetensors.index.json").write_bytes(mutations["encode"](index))
        opened = ShardedTensors(tmp_path)
        for name in opened.infos:
            opened.tensor(name)
        opened.close()

    where = {f"t{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    fuzz(parse, [{"metadata": {"total_size": 16}, "weight_map": where}], mutations["json"])


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_the_files_of_a_tokenizer(folder, fuzz, mutations, name):
    files = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.startswith(("tok", "gen"))}
    config = json.loads((folder / "config.json").read_text())
    messages = [{"role": "user", "content": "Who?"}]
    templates = [{"name": "default", "template": "{{ messages }}"}, {"name": "x", "template": "x"}]

    def parse(value):
        made = Tokenizer({**files, name: mutations["encode"](value)}, config)
        made.decode(made.encode("Once upon a time"))
        if made.has_chat:
            made.chat(messages)

    seed = json.loads(files[name])
    fuzz(parse, [seed, {**seed, "chat_template": templates}], mutations["json"])


def test_what_a_run_noted(fuzz, mutations, tmp_path):
    """A stopped run's ``state.json`` and a unit's record: it goes on, begins the unit anew, or is refused."""
    identity = {"recipe": {"name": "x", "rules": [{"match": "*"}]}, "torch": "2"}
    row = {"name": "a", "shape": [2, 2], "dtype": "float32", "bits": 32.0, "bytes": 16}
    out = tmp_path / "out"
    with CheckpointWriter(out, identity) as writer:
        writer.put("layer-0", {"a.weight": torch.ones(2, 2)}, [row])
    partial = tmp_path / "out.partial"
    seed = {name: json.loads((partial / name).read_bytes()) for name in ("state.json", "part-layer-0.json")}
    shutil.move(partial, tmp_path / "kept")

    def parse(value):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", partial)
        for name in seed:
            if isinstance(value, dict) and name in value:
                (partial / name).write_bytes(mutations["encode"](value[name]))
        with CheckpointWriter(out, identity) as writer:
            assert writer.units() == ["layer-0"] or value != seed
            if writer.has("layer-0"):
                writer.get("layer-0")

    fuzz(parse, [seed], mutations["json"])
