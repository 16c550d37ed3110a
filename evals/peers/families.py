"""What quantkit does with a tiny random model of each family that transformers can build.

    python evals/peers/families.py OUT.json [MODEL_TYPE ...]

Of every ``model_type`` of a causal or image-text language model: whether transformers builds a tiny one,
what of it is quantized without data at 8 and at 4 bits, and at 4 bits calibrated through transformers'
modules. And how far the results are from the model, read by quantkit and loaded by transformers: KL on
random tokens in float32, or why there is none. On random weights that shows that the mechanics are right, and
says nothing about quality. Each family runs in a process of its own, and is written down when it is done.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quantkit.support.errors import QuantkitError

SECONDS = 300
RECIPES = ("int8", "int4-rtn", "int4-gptq")
"""By which each family is quantized; the last two differ only in the method."""
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "n_embd": 128,
    "n_layer": 4, "n_head": 4, "n_positions": 256, "d_model": 128, "ffn_dim": 256, "num_layers": 4,
    "num_heads": 4, "encoder_layers": 2, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "word_embed_proj_dim": 128,
    "moe_intermediate_size": 64, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "block_ff_dim": 256, "ffn_hidden_size": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "image_size": 32, "patch_size": 8, "depth": 2,
    "embed_dim": 128, "out_hidden_size": 128, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 32,
    "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32, "global_head_dim": 32,
    "image_token_id": 3, "image_token_index": 3, "video_token_id": 4, "vision_start_token_id": 5,
    "vision_end_token_id": 6, "layer_types": None, "mlp_layer_types": None,
    "rotary_dim": 16}
"""Sizes of a tiny model by the keys of configs; those that a config hasn't got aren't used."""

_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
BESIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker",
                     "qwen2_5_vl", "qwen2_vl"), _SECTIONS),
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
                                      "partial_rotary_factor": 0.5}},
    "falcon_h1": {"mamba_d_ssm": 256}, "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2}, "step3p7": {"sliding_window": 24}}
"""What single families need besides, in the table of the language model."""


def tiny_config(model_type: str) -> Any:
    """A config of this family, small in all its tables."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    inside = {}
    besides = BESIDES.get(model_type, {})
    for name in getattr(CONFIG_MAPPING[model_type], "sub_configs", {}):
        table = getattr(AutoConfig.for_model(model_type), name, None)
        if table is not None:
            inside[name] = {"model_type": table.model_type, **_small(table),
                            **(besides if name == "text_config" else {})}
    outer = _small(AutoConfig.for_model(model_type))
    return AutoConfig.for_model(model_type, **outer | ({} if "text_config" in inside else besides), **inside)


def _small(config: Any) -> dict[str, Any]:
    written = config.to_dict()
    small = {key: value for key, value in SMALL.items() if key in written}
    for key, value in small.items():
        if value is not None and isinstance(given := written[key], (list, tuple)):
            layers = len(given) == written.get("num_hidden_layers")
            small[key] = [value] * (small["num_hidden_layers"] if layers else len(given))
    if "kv_lora_rank" in small:  # there each head has keys of its own
        small |= {"num_key_value_heads": small["num_attention_heads"], "head_dim": small["qk_rope_head_dim"]}
    if "expand" in written and "num_heads" in small:
        small["num_heads"] = written["expand"] * small["hidden_size"] // small["head_dim"]
    return small


def measure(model_type: str, folder: Path) -> dict[str, Any]:
    """The row of one family."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    from quantkit.testing.tiny import tiny_tokenizer

    kind = AutoModelForCausalLM if model_type in CAUSAL else AutoModelForImageTextToText
    try:
        torch.manual_seed(0)
        model = kind.from_config(tiny_config(model_type)).to(torch.bfloat16).eval()
        if (count := sum(p.numel() for p in model.parameters())) > 2**28:
            return {"built": f"no: {count:,} parameters"}
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.08)
        tokens = torch.randint(8, 500, (2, 48), generator=torch.Generator().manual_seed(1))
        model.save_pretrained(folder / "model")
        tiny_tokenizer().save(str(folder / "model" / "tokenizer.json"))
        expected = _logits(kind, folder / "model", tokens)
    except Exception as error:  # whatever transformers says
        return {"built": f"no: {type(error).__name__}: {' '.join(str(error).split())[:90]}"}
    from click.testing import CliRunner

    from quantkit.cli.main import main as quantkit

    inspected = CliRunner().invoke(quantkit, ["inspect", str(folder / "model")])
    row: dict[str, Any] = {"built": "yes", "inspect": "yes" if inspected.exit_code == 0 else (
        inspected.output.replace(f"{folder}/", "")[:300])}
    for recipe in RECIPES:
        try:
            row[recipe] = _quantized(kind, folder, recipe, tokens, expected)
        except Exception as error:
            text = str(error).replace(f"{folder}/", "")[:300]
            row[recipe] = {"error": f"{type(error).__name__}: {text}"}
    return row


def _logits(kind: Any, folder: Path, tokens: Any) -> Any:
    import torch

    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)


def _quantized(kind: Any, folder: Path, recipe: str, tokens: Any, expected: Any) -> dict[str, Any]:
    """A cell: the distance of what the checkpoint's file says, read by quantkit, and of what transformers
    reads in it, or why that refuses it."""
    from quantkit.quantization.recipe import CalibrationSpec, load_recipe
    from quantkit.quantization.run import quantize
    from quantkit.runtime.loader import load
    from quantkit.runtime.modules_model import load_through_modules

    chosen = load_recipe("int4-rtn" if recipe == "int4-gptq" else recipe)
    if recipe == "int4-gptq":
        rules = tuple(rule.model_copy(update={"method": "gptq"}) if rule.match == "model.layers.*" else rule
                      for rule in chosen.rules)
        text = CalibrationSpec(text="random", windows=32, window=128)
        chosen = chosen.model_copy(update={"name": recipe, "rules": rules, "calibration": text})
    made = chosen.model_copy(update={"engine": "transformers"})
    try:
        result, refused = quantize(str(folder / "model"), made, folder / recipe), None
    except QuantkitError as error:
        refused = f"refused: {error.why or error.what}"[:300]
        result = quantize(str(folder / "model"), chosen, folder / f"{recipe}-vllm")
    record = result.plan.outline_record
    share = None if record is None else record.quantized / (record.quantized + sum(record.kept.values()))
    row = {"quantized": share, "layers": sum(row.spec is not None for row in result.rows),
           "kept": None if record is None else record.kept}
    try:
        ours = (load if record is None else load_through_modules)(str(result.out), dtype="float32")
        row["kl"] = _kl(expected, _ours(ours, tokens))
    except QuantkitError as error:
        row["kl"] = f"refused: {error.what}"[:300]
    try:
        row["transformers"] = refused or _kl(expected, _logits(kind, result.out, tokens))
    except Exception as error:
        row["transformers"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return row


def _ours(loaded: Any, tokens: Any) -> Any:
    import torch

    with torch.inference_mode():
        return loaded.model(tokens).float().log_softmax(-1)


def _kl(expected: Any, actual: Any) -> float:
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


def families() -> list[str]:
    """Every ``model_type`` of a language model."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def write_rows(out: Path, rows: dict[str, Any]) -> None:
    """A JSON object with a line for each row."""
    lines = (f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in sorted(rows.items()))
    out.write_text("{" + ",\n ".join(lines) + "}\n")


def main(out: Path, wanted: list[str]) -> None:
    rows = json.loads(out.read_text()) if out.exists() else {}
    for model_type in wanted or families():
        if model_type in rows and not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, __file__, "--one", model_type, folder]
            try:
                done = subprocess.run(run, capture_output=True, text=True, timeout=SECONDS)
                rows[model_type] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {
                    "built": f"no: the process ended with {done.returncode}"}
            except subprocess.TimeoutExpired:
                rows[model_type] = {"built": f"no: not within {SECONDS} s"}
        write_rows(out, rows)
        print(model_type, json.dumps(rows[model_type])[:300], flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]))))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
