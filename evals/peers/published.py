"""What quantkit plans for published models, beside the sizes that their makers and the Hub state.

    python evals/peers/published.py CONFIGS_DIR OUT.json [NAME ...]

``CONFIGS_DIR`` holds a ``NAME.json`` for each model, a copy of its ``config.json``, and ``published.json``:
by NAME the published number of ``parameters`` and where it (``source``) and the copy (``config``) are from.
Where they are known, also

- ``left_out``: what transformers leaves out of the network, such as layers that propose tokens. ``copies``
  says which of the network's layers each is like, by the beginnings of names; ``shapes`` has what else there
  is, and ``null`` for what a copy hasn't.
- ``renames``: patterns of names, and what the published files have instead.
- ``together``: whether the published files have the experts of a layer in one tensor.
- ``releases``: quantized models that others published, each with the ``recipe`` that is nearest to it.

transformers builds the network without memory and names its tensors as it saves them. A folder with headers
of these names and shapes, in bfloat16, and with files of that size but without content is then planned.
"""

from __future__ import annotations

import json
import math
import re
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from quantkit.models.modules import config_there, quiet
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import load_recipe
from quantkit.sources.base import ModelSource
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError
from quantkit.testing.tiny import tiny_tokenizer

Shapes = dict[str, list[int]]
RECIPES = ("int8", "int4-rtn")
BLOCK = 128  # rows and columns that share a scale in the makers' FP8 files
PER_SHARD = 20_000  # tensors in a file: a mixture of a thousand experts has more than a file may list


def saved_shapes(config: Mapping[str, Any], published: Mapping[str, Any]) -> tuple[Shapes, bool]:
    """The shapes of a model's tensors by the names of its files, and whether its head is its embedding."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import remove_tied_weights_from_state_dict
    from transformers.models.auto import modeling_auto as auto

    there = config_there(config, config["model_type"])
    kinds = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = next((name for name in config["architectures"] if hasattr(transformers, name)),
                kinds[config["model_type"]])
    with no_init_weights(), torch.device("meta"), quiet():
        network = getattr(transformers, kind)._from_config(there, dtype=torch.bfloat16)
        network.tie_weights()
        tensors = {name: tensor for name, tensor in network.state_dict().items()
                   if name not in (network._keys_to_ignore_on_save or ())}
        tensors = remove_tied_weights_from_state_dict(tensors, network)
        if not published.get("together"):
            tensors = revert_weight_conversion(network, tensors)
    shapes = {}
    for name, tensor in tensors.items():
        for pattern, new in published.get("renames", {}).items():
            name = re.sub(pattern, new, name)
        shapes[name] = list(tensor.shape)
    left_out = published.get("left_out", {})
    for new, old in left_out.get("copies", {}).items():
        shapes |= {new + name[len(old):]: shape for name, shape in shapes.items() if name.startswith(old)}
    shapes |= left_out.get("shapes", {})
    tied = bool(getattr(there.get_text_config(), "tie_word_embeddings", False))
    return {name: shape for name, shape in shapes.items() if shape is not None}, tied


def write_folder(folder: Path, config: Mapping[str, Any], shapes: Shapes, tied: bool) -> None:
    """A model whose files have headers and sizes, and take no disk."""
    names, places = list(shapes), {}
    for start in range(0, len(names), PER_SHARD):
        file, header, end = f"model-{start:06}.safetensors", {}, 0
        for name in names[start:start + PER_SHARD]:
            size = 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            places[name], end = file, end + size
        written = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(written).to_bytes(8, "little") + written)
            out.truncate(8 + len(written) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    plain = {**config, "dtype": "bfloat16", "tie_word_embeddings": tied}
    plain.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(plain))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))


def planned(source: ModelSource, recipe: str, copies: Mapping[str, str]) -> dict[str, Any]:
    """The plan of a recipe, in numbers; or why there is none. ``copies``: layers that are kept here, and that
    makers' FP8 files quantize as the layers that they are like."""
    try:
        plan = make_plan(load_recipe(recipe), source)
    except QuantkitError as error:
        return {"refused": f"{error.what}: {error.why}"[:400]}
    blocks = {row.name: math.prod(-(-side // BLOCK) for side in row.shape) for row in plan.rows if row.method}
    around = plan.outer.rest_bytes if plan.outer is not None else 0
    record = plan.outline_record
    assert record is not None, "its mathematics is known"
    share = record.quantized / (record.quantized + sum(record.kept.values()))
    source_bytes = plan.other_bytes + around + sum(row.bytes_before for row in plan.rows)
    return {"source_bytes": source_bytes, "bytes": plan.disk_bytes, "share": round(share, 5),
            "bits_per_weight": round(plan.bits_per_weight, 4), "kept": record.kept,
            "layers": record.layer_prefix, "modules": sorted({name.rpartition(".")[2] for name in blocks}),
            "blocks": sum(blocks.values()), "blocks_of_copies": sum(
                count for old in copies.values() for name, count in blocks.items() if name.startswith(old))}


def measure(config: Mapping[str, Any], published: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one model."""
    shapes, tied = saved_shapes(config, published)
    copies = published.get("left_out", {}).get("copies", {})
    recipes = dict.fromkeys((*RECIPES, *(release["recipe"] for release in published.get("releases", ()))))
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), config, shapes, tied)
        start = time.process_time()
        with closing(open_source(name)) as source:
            plans = {recipe: planned(source, recipe, copies) for recipe in recipes}
        seconds = round(time.process_time() - start, 1)
        disk = sum(512 * path.stat().st_blocks for path in Path(name).iterdir())
    ratio = plans["int8"].get("source_bytes", 0) / (2 * published["parameters"])
    return {**published, "tensors": len(shapes), "ratio": ratio, "plans": plans, "disk": disk,
            "seconds": seconds, "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def main(configs: Path, out: Path, wanted: list[str]) -> None:
    import families

    table = json.loads((configs / "published.json").read_text())
    rows = json.loads(out.read_text()) if out.exists() else {}
    for name in wanted or table:
        rows[name] = measure(json.loads((configs / f"{name}.json").read_text()), table[name])
        families.write_rows(out, rows)
        print(name, rows[name]["tensors"], f"{rows[name]['ratio']:.9f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
