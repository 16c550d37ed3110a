"""``config.json`` of each family, alone and beside other tools' ``quantization_config``: opened as all
commands do, read layer by layer, and asked which engines and kernels take it."""

from __future__ import annotations

import json

import pytest

from quantkit.checkpoint.engines import ENGINES, check_engine
from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.inspect import inspect_facts
from quantkit.models.loadable import check_loadable
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.support.errors import CheckpointError
from quantkit.testing import FAMILIES, tiny_model

GROUP, CHANNEL = "granularity: {strategy: group, size: 32}", "granularity: {strategy: channel}"
FORMATS = {
    "gptq": f"rtn, format: gptq, spec: {{bits: 4, {GROUP}}}",
    "gptq-v2": f"rtn, format: gptq-v2, spec: {{bits: 8, symmetric: false, {GROUP}}}",
    "awq": f"rtn, format: awq, spec: {{bits: 4, symmetric: false, {GROUP}}}",
    "packed": f"rtn, format: pack-quantized, spec: {{bits: 4, symmetric: false, {GROUP}}}",
    "w8a8": f"rtn, format: int-quantized, spec: {{bits: 8, {CHANNEL}, activations: token}}",
    "fp8": f"rtn, format: float-quantized, spec: {{kind: fp, bits: 8, {CHANNEL}}}",
    "bnb-int8": f"rtn, format: bnb-int8, spec: {{bits: 8, {CHANNEL}}}",
    "mlx": f"rtn, format: mlx, spec: {{bits: 4, symmetric: false, minimum: true, {GROUP}}}",
    "nf4": "nf4, spec: {kind: nf, bits: 4, granularity: {strategy: block, size: 64}, scale_dtype: float32, "
           "nested: true}"}
ALONE = {
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 256}}}


def _config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder → its config, of every family and of some ropes."""
    place = tmp_path_factory.mktemp("models")
    folders = [tiny_model(place / family, family) for family in FAMILIES]
    folders += [tiny_model(place / name, "llama", **change) for name, change in ALONE.items()]
    return {folder: _config(folder) for folder in folders}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The same of checkpoints without a manifest, as another tool's are."""
    place, made = tmp_path_factory.mktemp("quantized"), {}
    for number, (name, rule) in enumerate(FORMATS.items()):
        (place / "r.yaml").write_text("rules:\n  - {match: lm_head, optional: true}\n"
                                      "  - {match: '*o_proj', method: null}\n"
                                      f"  - {{match: '*', method: {rule}}}\n")
        source = tiny_model(place / "source", ("llama", "qwen2", "qwen3_moe", "gemma3_text")[number % 4])
        made[name] = quantize(str(source), str(place / "r.yaml"), place / name).out
        (made[name] / "quantkit.json").unlink()
    return {folder: _config(folder) for folder in made.values()}


@pytest.fixture
def mutate(mutations):
    """The folder stays, its config is mutated."""
    return lambda seed, chance: (seed[0], mutations["json"](seed[1], chance))


def test_a_model(models, fuzz, mutate, mutations):
    recipe = load_recipe("int8")

    def parse(seed):
        folder, value = seed
        (folder / "config.json").write_bytes(mutations["encode"](value))
        source = open_model(str(folder))
        try:
            if isinstance(source, Checkpoint | ForeignCheckpoint):
                return
            make_plan(recipe, source)
        finally:
            source.close()
        inspect_facts(str(folder))

    fuzz(parse, list(models.items()), mutate)


def test_another_tools_checkpoint(quantized, fuzz, mutate, mutations):
    def parse(seed):
        folder, value = seed
        (folder / "config.json").write_bytes(mutations["encode"](value))
        opened = open_model(str(folder))
        try:
            if not isinstance(opened, ForeignCheckpoint):
                return
            check_loadable(str(folder), opened.config(), opened.infos, opened.side_files(), opened.layers,
                           error=CheckpointError)
            for row in opened.layers[:3]:
                opened.quantized(row.name)
            for engine in ENGINES:
                for device in ("cpu", "cuda"):
                    check_engine(engine, opened, device)
        finally:
            opened.close()
        inspect_facts(str(folder))

    def both(seed, chance):
        """The whole config now, what stands in quantization_config then."""
        folder, config = mutate(seed, chance) if chance.random() < 0.3 else seed
        if config is seed[1]:
            changed = mutations["json"](config["quantization_config"], chance)
            config = config | {"quantization_config": changed}
        return folder, config

    fuzz(parse, list(quantized.items()), both)
