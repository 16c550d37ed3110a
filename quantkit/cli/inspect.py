"""``quantkit inspect MODEL``: what a model or a checkpoint holds, and which kernel each layer gets."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit.cli.options import layers_option, revision_option
from quantkit.cli.present import group_layers, print_json, table, wrapped
from quantkit.support.units import human_bytes

if TYPE_CHECKING:
    import torch

    from quantkit.checkpoint.open import AnyCheckpoint
    from quantkit.kv.spec import KVSpec
    from quantkit.models.config import ModelConfig
    from quantkit.runtime.kernels import Layer
    from quantkit.sources.base import ModelSource

OPERATIONS = "other operations"
PHASES = ("decode", "prefill")
NOBODY: dict[str, Any] = {"kernels": {phase: {"kernel": None, "declined": []} for phase in PHASES}}
"""Of a layer whose model isn't run here."""
DECLINED_HINT = "--declined shows which other kernels declined, and why"
declined_option = click.option("--declined", is_flag=True,
                               help="Also show which kernels declined, and why.")


@click.command("inspect")
@click.argument("model")
@revision_option
@layers_option()
@declined_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, one row per layer.")
def command(model: str, revision: str | None, layers: bool, declined: bool, as_json: bool) -> None:
    """Show what a model or checkpoint holds, layer by layer.

    MODEL is a checkpoint of quantkit or another tool, a local folder, a .gguf file, pkg:NAME, synthetic:NAME
    or a model on the hub. No weight is read. The output names the kernel that would run each layer on this
    machine; --declined also shows which other kernels declined, and why.
    """
    facts = inspect_facts(model, revision)
    if as_json:
        print_json(facts)
        return
    _print_head(facts)
    click.echo()
    click.echo(_layer_table(facts["layers"], grouped=not layers))
    if facts["operations"]:
        click.echo("\nother operations")
    for line in other_lines(facts["operations"]):
        click.echo(line)
    reasons = list(_declined_lines(facts["layers"]))
    if reasons and declined:
        click.echo("\nkernels that declined")
        for line in reasons:
            click.echo(line)
    elif reasons:
        click.echo(f"\n{DECLINED_HINT}")
    noted = [(row["name"], text) for row in facts["layers"] for text in row["notes"]]
    if noted:
        click.echo("\nfallbacks taken")
        for name, text in noted:
            click.echo(wrapped("", f"{name}: {text}", 2))


def inspect_facts(uri: str, revision: str | None = None) -> dict[str, Any]:
    """Everything that ``inspect`` shows, as plain data; layers one by one.

    Raises:
        SourceError, CheckpointError, UnsupportedModelError: as opening the model does.
    """
    from quantkit.checkpoint.dequantized import DequantizedCheckpoint, is_unknown
    from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
    from quantkit.checkpoint.open import open_model
    from quantkit.checkpoint.reader import Checkpoint

    opened = open_model(uri, revision)
    try:
        if isinstance(opened, ForeignCheckpoint) and is_unknown(opened):
            return _source_facts(DequantizedCheckpoint(opened, uri), uri)
        if isinstance(opened, Checkpoint | ForeignCheckpoint):
            return _checkpoint_facts(opened, uri)
        return _source_facts(opened, uri)
    finally:
        opened.close()


def _source_facts(source: ModelSource, uri: str) -> dict[str, Any]:
    from quantkit.checkpoint.open import model_around
    from quantkit.kv.spec import KVSpec
    from quantkit.models.architecture import EMBEDDING
    from quantkit.models.outline import outline_of
    from quantkit.runtime.memory.weights import stored_blocks, stored_bytes
    from quantkit.sources.base import file_bytes, quantized_types, stored_tensors
    from quantkit.sources.open import kind_of

    infos, stored = source.tensors(), stored_tensors(source)
    outline = outline_of(uri, source.config(), infos)
    layers, slots = [], [slot for slot in outline.slots if slot.name != EMBEDDING]
    for slot in slots:
        tensor = stored.get(f"{slot.name}.weight")
        layers.append({
            "name": slot.name, "shape": [slot.out_features, slot.in_features],
            "dtype": tensor.type if tensor else None,
            "method": None, "format": None, "spec": None, "label": None,
            "bytes": tensor.nbytes if tensor else 0,
            "bits": 8 * tensor.nbytes / (slot.out_features * slot.in_features) if tensor else None,
            "error": None, "notes": []})
    types = list(quantized_types(source))
    facts = {"uri": uri, "kind": "source", "path_kind": kind_of(uri) or "unknown",
             "parameters": sum(math.prod(i.shape) for i in infos.values()), "tensors": len(infos),
             "bytes": file_bytes(source), "dtypes": dict(Counter(tensor.type for tensor in stored.values())),
             "quantized_types": types, "bits_per_weight": _bits(layers),
             "recipe": None, "kv": "none", "source": None, "around": model_around(source)}
    if (config := outline.config) is None:
        return facts | {"architecture": outline.model_type, "num_layers": outline.num_layers,
                        "kept": dict(outline.kept), "operations": [],
                        "works": _what_works(source.config(), outline.model_type),
                        "layers": [row | NOBODY for row in layers]}
    import torch

    device, dtype = torch.device(best_device()[0]), _dtype(source.config())
    blocks = stored_blocks(source, config, dtype, device)
    kernels = _kernels(source.config(), config, KVSpec(), {
        slot.name: blocks.get(slot.name, (slot.out_features, slot.in_features)) for slot in slots})
    return facts | {**_config_facts(config), "operations": kernels.pop(OPERATIONS),
                    "bytes_as_run": stored_bytes(config, dtype, blocks),
                    "decoded": [row["name"] for row in layers if row["name"] not in blocks
                                and row["dtype"] in types],
                    "layers": [row | {"kernels": kernels[str(row["name"])]} for row in layers]}


def _what_works(config: Mapping[str, Any], model_type: str) -> dict[str, str]:
    """With a model whose mathematics isn't known here."""
    from quantkit.models.modules import config_there, library, quiet
    from quantkit.support.errors import UnsupportedModelError

    try:
        with quiet():
            config_there(config, model_type)
        through = f"through {library()}"
    except UnsupportedModelError as error:
        through = f"no: {error.what}"
    except Exception as error:  # whatever transformers raises is its word on this config
        through = f"no: transformers refuses its config: {str(error).splitlines()[0][:80]}"
    return {"data-free": "yes", "calibrated": through, "run": "by engines that know the family, such as vLLM"}


def _checkpoint_facts(checkpoint: AnyCheckpoint, uri: str) -> dict[str, Any]:
    from quantkit.checkpoint.open import model_around
    from quantkit.checkpoint.quantization_config import KEYS
    from quantkit.kv.spec import KVSpec, setting_of
    from quantkit.models.architecture import parse_config
    from quantkit.runtime.memory.weights import weight_of

    manifest = checkpoint.manifest
    infos = checkpoint.infos
    rows = checkpoint.layers
    plain = {k: v for k, v in checkpoint.config().items() if k not in KEYS}
    described: dict[str, Any]
    if manifest is not None and (outline := manifest.outline) is not None:
        kv, kernels = KVSpec(), dict.fromkeys((row.name for row in rows), NOBODY["kernels"])
        numbers = {row.name.removeprefix(outline.layer_prefix).partition(".")[0] for row in rows}
        described = {"architecture": outline.model_type, "kept": outline.kept, "operations": [],
                     "num_layers": len(numbers)}
    else:
        config, kv = parse_config(plain), setting_of(manifest.recipe) if manifest else KVSpec()
        kernels = _kernels(plain, config, kv, {row.name: weight_of(row) or row.shape for row in rows})
        described = {**_config_facts(config), "operations": kernels.pop(OPERATIONS)}
    layers = [{**row.to_dict(), "label": row.spec.label() if row.spec else None,
               "kernels": kernels[row.name]} for row in rows]
    inside = {row.name for row in rows}
    # a layer's own tensors are counted by its logical shape, a bias and all else as they are
    outside = [info for name, info in infos.items() if name.endswith(".bias")
               or inside.isdisjoint(itertools.accumulate(name.split("."), "{}.{}".format))]
    return {"uri": uri, "kind": "checkpoint" if manifest else "another tool's checkpoint", "path_kind": None,
            **described, "parameters": sum(math.prod(row.shape) for row in rows) + sum(math.prod(i.shape)
                                                                          for i in outside),
            "tensors": len(infos), "bytes": checkpoint.file_bytes,
            "dtypes": dict(Counter(str(i.dtype).removeprefix("torch.") for i in infos.values())),
            "bits_per_weight": checkpoint.bits_per_weight,
            "recipe": manifest.recipe.get("name") if manifest else None, "kv": str(kv),
            "around": model_around(checkpoint),
            "source": manifest.source.model_dump(mode="json") if manifest else None, "layers": layers}


def _config_facts(config: ModelConfig) -> dict[str, Any]:
    return {"architecture": config.model_type, "hidden_size": config.hidden_size,
            "num_layers": config.num_layers, "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim,
            "vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings}


def _kernels(hf: Mapping[str, Any], config: ModelConfig, kv: KVSpec,
             layers: Mapping[str, Layer]) -> dict[str, Any]:
    """Who runs each layer where models run here, by name; under :data:`OPERATIONS` the other operations."""
    import dataclasses

    import torch

    from quantkit.runtime.kernels import linear_kernels, other_kernels

    device, dtype = torch.device(best_device()[0]), _dtype(hf)
    named = linear_kernels(config, dtype, device, layers)
    kernels: dict[str, Any] = {name: {phase: {
        "kernel": kernel, "declined": [{"kernel": k, "reason": why} for k, why in declined]}
        for phase, (kernel, declined) in phases.items()} for name, phases in named.items()}
    others = other_kernels(config, kv, dtype, device, layers)
    return kernels | {OPERATIONS: [dataclasses.asdict(other) for other in others]}


def _dtype(hf: Mapping[str, Any]) -> torch.dtype:
    """The dtype that the model is run in; bfloat16 for one whose dtype is wrong: it can be described all the
    same."""
    import torch

    from quantkit.models.loadable import dtype_of
    from quantkit.support.errors import SourceError

    try:
        return dtype_of(hf)
    except SourceError:
        return torch.bfloat16


def _bits(layers: list[dict[str, Any]]) -> float:
    weights = sum(math.prod(row["shape"]) for row in layers)
    return 8 * sum(row["bytes"] for row in layers) / weights if weights else 0.0


def _print_head(facts: dict[str, Any]) -> None:
    if "kept" in facts:
        text = (f"{facts['architecture']}: {facts['num_layers']} layers; its mathematics isn't known here: "
                "other engines run it")
    else:
        tied = ", embeddings tied" if facts["tie_word_embeddings"] else ""
        text = (f"{facts['architecture']}: {facts['num_layers']} layers, hidden {facts['hidden_size']}, "
                f"{facts['num_heads']} heads of {facts['head_dim']} ({facts['num_kv_heads']} KV), "
                f"vocabulary {facts['vocab_size']:,}, context {facts['max_position_embeddings']:,}{tied}")
    dtypes = ", ".join(f"{count} {name}" for name, count in facts["dtypes"].items())
    what = facts["kind"] if facts["path_kind"] is None else f"{facts['path_kind']} source"
    click.echo(wrapped("model", f"{facts['uri']} ({what})"))
    if (around := facts.get("around")) is not None:
        text += f"; inside a {around} model, whose other tensors aren't counted here"
    click.echo(wrapped("architecture", text))
    click.echo(wrapped("parameters", f"{facts['parameters']:,}"))
    click.echo(wrapped("tensors", f"{facts['tensors']} ({dtypes}), {human_bytes(facts['bytes'])}"))
    click.echo(wrapped("bits/weight", f"{facts['bits_per_weight']:.2f} over all Linear layers"))
    for name, how in facts.get("works", {}).items():
        click.echo(wrapped(name, how))
    if kept := facts.get("kept"):
        click.echo(wrapped("kept", "; ".join(f"{why} {count / facts['parameters']:.1%}"
                                             for why, count in kept.items())))
    if facts.get("quantized_types") and "decoded" in facts:
        layers, decoded = facts["layers"], facts["decoded"]
        types = ", ".join(sorted({row["dtype"] for row in layers if row["name"] in decoded}))
        rest = f"; {len(decoded)} of {len(layers)} layers ({types}) as 16-bit numbers: no kernel has these"
        what = "16-bit numbers" if len(decoded) == len(layers) else "the file's own blocks"
        click.echo(wrapped("runs as", f"{what}, {human_bytes(facts['bytes_as_run'])}"
                           + (rest if 0 < len(decoded) < len(layers) else "")))
    from quantkit.models.architecture import EMBEDDING

    kinds = Counter((row["name"] == EMBEDDING, row["method"], row["label"], row["format"])
                    for row in facts["layers"])
    for (embedding, method, label, form), count in kinds.items():
        if method:
            what = "the embedding" if embedding else f"{count} layers"
            click.echo(wrapped("quantized", f"{what} by {method}, {label}, {form}"))
    if facts["kv"] != "none":
        click.echo(wrapped("KV cache", facts["kv"]))
    if facts["source"]:
        made = facts["source"]
        at = f" at {made['revision']}" if made["revision"] else ""
        click.echo(wrapped("made from", f"{made['uri']}{at}, recipe {facts['recipe']}"))


def _layer_table(layers: list[dict[str, Any]], grouped: bool) -> str:
    """A row a kind of layer (numbers replaced by ``*``) or a row a layer, 80 columns wide."""
    def what(row: dict[str, Any]) -> tuple[Any, ...]:
        return (tuple(row["shape"]), f"{row['method'] or 'kept'} {_short(row)}",
                *(row["kernels"][phase]["kernel"] or "none" for phase in PHASES))

    rows = []
    for name, members in group_layers(layers, lambda row: str(row["name"]), what, each=not grouped):
        shape, stored, *kernels = what(members[0])
        bits = members[0]["bits"]
        rows.append([name, str(len(members)), "×".join(map(str, shape)), stored,
                     "?" if bits is None else f"{bits:.2f}",
                     human_bytes(sum(row["bytes"] for row in members)), *kernels])
    headers = ["layer", "n", "shape", "is", "bits", "bytes", *PHASES]
    if not grouped:
        headers, rows = [headers[0], *headers[2:]], [[row[0], *row[2:]] for row in rows]
    return table(headers, rows, right=[i for i, h in enumerate(headers) if h in ("n", "bits", "bytes")])


def _short(row: dict[str, Any]) -> str:
    """``int4``, ``nf4``; the full spec stands in the head."""
    return f"{row['spec']['kind']}{row['spec']['bits']}" if row["spec"] else str(row["dtype"])


def _declined_lines(layers: list[dict[str, Any]]) -> Iterator[str]:
    """Each reason once, with the number of layers it holds for."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for row in layers:
        for phase in PHASES:
            for entry in row["kernels"][phase]["declined"]:
                counted[(phase, entry["kernel"], entry["reason"])] += 1
    for (phase, kernel, reason), count in counted.items():
        yield wrapped(f"  {phase}", f"{kernel}: {reason} ({count} layers)", 11)


def best_device() -> tuple[str, tuple[int, int] | None]:
    """``cuda`` with its compute capability where there is one, else ``cpu``: where models run."""
    import torch

    return ("cuda", torch.cuda.get_device_capability()) if torch.cuda.is_available() else ("cpu", None)


def other_lines(choices: list[dict[str, Any]]) -> Iterator[str]:
    """Lines for a terminal: one per operation."""
    for choice in choices:
        yield wrapped(f"  {choice['op']}", choice["kernel"] + (f": {choice['reason']}"
                                                               if choice["reason"] else ""), 20)
