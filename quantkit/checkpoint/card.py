"""Writes the model card, ``README.md``: what the checkpoint is, what it was made from, how to load it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.engines import DEQUANTIZED, check_layers
from quantkit.checkpoint.manifest import Manifest, reached_experts
from quantkit.checkpoint.quantization_config import stored_quantization
from quantkit.models.architecture import EMBEDDING

_TRANSFORMERS = """### transformers

Needs `pip install transformers {extra}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
```
"""
_DEQUANTIZED = """
It loads there only when it is dequantized at once: give `from_pretrained`
`quantization_config=CompressedTensorsConfig(dequantize=True)` (imported from `transformers`).
"""
_VLLM = """### vLLM

```sh
vllm serve FOLDER{option}
```

`quantkit verify FOLDER --for vllm` says whether its kernels take every layer.
"""
_MLX = """### mlx-lm

```sh
pip install mlx-lm
mlx_lm.generate --model FOLDER --prompt "Once upon a time"
```

`quantkit verify FOLDER --for mlx` says whether its class of model is the same as here.
"""
_QUANTKIT = """### quantkit

```sh
quantkit generate FOLDER "Once upon a time"
quantkit verify FOLDER
```
"""


def model_card(manifest: Manifest, config: Mapping[str, Any]) -> bytes:
    """Markdown with a YAML head as the Hub reads it, in UTF-8; the same manifest gives the same bytes.

    Args:
        manifest: with its layers filled in.
        config: the ``config.json`` that was written.
    """
    source, recipe = manifest.source, manifest.recipe
    head = ["---", "tags:", "- quantkit", "- quantized"]
    if source.kind == "hub":
        head += [f"base_model: {source.uri.removeprefix('hf:')}", "base_model_relation: quantized"]
    head += ["---", ""]
    revision = f" at revision `{source.revision}`" if source.revision else ""
    if source.files:
        revision += f"; the sha256 of its {len(source.files)} files are in `quantkit.json`"
    lines = [
        f"# {source.uri}, quantized by recipe `{recipe.get('name')}`", "",
        str(recipe.get("description", "")), "",
        f"- made from: `{source.uri}` ({source.kind}){revision}",
        f"- made by: quantkit {manifest.quantkit_version}",
        f"- bits a weight in Linear layers: {manifest.bits_per_weight:.3f}, scales included"]
    if (came := manifest.exported) is not None:
        digest = f", the sha256 of its manifest is `{came.manifest_sha256}`" if came.manifest_sha256 else ""
        lines.append(f"- packed from: `{came.uri}` ({', '.join(came.formats)}, {came.quant_method}), "
                     f"levels and scales unchanged{digest}")
    if manifest.plugins:
        lines.append("- with: " + ", ".join(f"{name} {version}" for name,
                                            version in sorted(manifest.plugins.items())))
    if (facts := manifest.calibration) is not None:
        lines.append(f"- calibrated on: {facts.tokens:,} tokens of `{facts.text}` "
                     f"({facts.windows} windows of {facts.window}, seed {facts.seed}), "
                     f"sha256 of the token ids `{facts.sha256}`")
        if facts.coverage is not None:
            lines += [f"  - {line}" for line in facts.coverage.lines()]
            lines += [f"  - **{line}**" for line in facts.coverage.warnings(facts.window)]
        if (experts := reached_experts(manifest.layers)) is not None:
            lines.append(f"  - experts: {experts}")
    if (recovery := manifest.recovery) is not None and recovery.kept:
        lines.append(f"- scales and norms: trained by {recovery.name} on "
                     f"{recovery.windows - recovery.held_out} windows; KL on {recovery.held_out} others "
                     f"{recovery.before:.4g} → {recovery.after:.4g}")
    if (table := next((row for row in manifest.layers if row.name == EMBEDDING), None)) and table.spec:
        lines.append(f"- the embedding: {table.method}, {table.spec.label()}, {table.format}")
    lines += ["", "| layers | method | spec | format | mean relative weight error |", "|---|---|---|---|---|"]
    lines += _table(manifest)
    notes = [f"- `{row.name}`: {note}" for row in manifest.layers for note in row.notes]
    if facts is not None and facts.coverage is not None and facts.coverage.fallback:
        notes.insert(0, f"- calibration: {facts.coverage.fallback}")
    if recovery is not None and recovery.note:
        notes.insert(0, f"- recover: {recovery.note}")
    if notes:
        lines += ["", "## Fallbacks taken", "", *notes]
    lines += ["", "## Recipe", "", "```json", json.dumps(recipe, indent=1, ensure_ascii=False), "```"]
    return "\n".join([*head, *lines, "", "## How to load it", "", _loading(manifest, config)]).encode()


def _table(manifest: Manifest) -> list[str]:
    rows = [row for row in manifest.layers if row.name != EMBEDDING]
    kinds = [(row.method or "kept", row.spec.label() if row.spec else row.dtype, row.format or "–")
             for row in rows]
    lines = []
    for kind, count in Counter(kinds).items():
        errors = [row.error for row, k in zip(rows, kinds, strict=True)
                  if k == kind and row.error is not None]
        mean = f"{sum(errors) / len(errors):.4f}" if errors else "–"
        lines.append(f"| {count} | {' | '.join(kind)} | {mean} |")
    return lines


def _loading(manifest: Manifest, config: Mapping[str, Any]) -> str:
    method = (stored_quantization(config) or {}).get("quant_method")
    extras = {"compressed-tensors": "compressed-tensors accelerate",
              "bitsandbytes": "bitsandbytes accelerate", "gptq": "optimum gptqmodel",
              "awq": "gptqmodel accelerate", "fp8": "accelerate", None: "accelerate"}
    if manifest.outline is not None:
        return (f"This model's mathematics isn't known to quantkit. Engines that run the original and read "
                f"compressed-tensors, such as {manifest.outline.readers}, run this, too.\n\n"
                + _VLLM.format(option=""))
    parts = [_QUANTKIT]
    failed = [check.detail for check in check_layers("transformers", config, manifest.layers)
              if check.status == "failed"]
    if method in extras and all(DEQUANTIZED in detail for detail in failed):
        parts.append(_TRANSFORMERS.format(extra=extras[method]) + (_DEQUANTIZED if failed else ""))
    if method in ("compressed-tensors", "gptq", "awq", "fp8", None):
        parts.append(_VLLM.format(option=" --dtype float16" if method in ("gptq", "awq") else ""))
    if method == "mlx":
        parts.append(_MLX)
    if method == "quantkit":
        parts.append("No standard layout says this mix of layers: only quantkit reads it.\n")
    return "\n".join(parts)
