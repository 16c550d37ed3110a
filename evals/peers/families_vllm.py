"""Whether vLLM's CPU build reads what quantkit makes of families whose mathematics isn't known here.

    python evals/peers/families_vllm.py VLLM_PYTHON OUT.json [MODEL_TYPE ...]

Of each family a random model, small but for vLLM's kernels, is run by vLLM as it is, and then quantized by
the two recipes whose Linears this build multiplies. Gaps are mean absolute differences of the tokens'
log-probabilities: ``plain_gap`` to the plain model in transformers, ``file_gap`` to what the checkpoint's
file says, dequantized and read by quantkit, ``quantization_gap`` between these two. vLLM computes in
bfloat16, the other side in float32. A checkpoint is read rightly if its ``file_gap`` is about the plain
model's ``plain_gap``. Of ``w8a8`` vLLM rounds the inputs too, and quantkit leaves them here: its gaps are
larger. A family that vLLM can't run unquantized has the reason in its row. Each has processes of its own.
Two things are changed in vLLM: it inspects classes without another process, which is faster, and its kernels
for quantized experts, which are given the chosen ones, are let run whatever way of choosing a family has.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 240
PLAIN, RECIPES = "plain", ("w8a8", "int4-rtn")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_INT4_W4A8": "0"}
"""vLLM's: one process, and inputs of 4-bit Linears as they are."""
FAMILIES = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_next", "gemma4_text", "gemma4", "gemma3n_text",
    "gemma", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3", "deepseek_v32",
    "kimi_linear", "minimax_m2", "ministral3", "mistral4", "nemotron_h", "granite", "granitemoehybrid",
    "lfm2", "lfm2_moe", "falcon_h1", "llama4_text", "smollm3", "olmo2", "olmo3", "seed_oss", "ernie4_5",
    "ernie4_5_moe", "hunyuan_v1_dense", "exaone4", "cohere2", "apertus", "stablelm", "phi", "phimoe",
    "qwen2_moe", "qwen2_5_vl")
"""Those that are run most, the first ones before others."""
LARGER: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "global_head_dim": 64, "n_embd": 256,
    "d_model": 256, "ffn_dim": 512, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "block_ff_dim": 512, "ffn_hidden_size": 512, "out_hidden_size": 256, "mamba_d_head": 64,
    "mamba_head_dim": 64, "mamba_num_heads": 8, "n_groups": 1, "hidden_size_per_layer_input": 64,
    "rotary_dim": 32, "moe_num_experts": 8}
"""Sizes that vLLM's kernels take, instead of families.py's."""
_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 16}
_CONVOLUTION = {"block_dim": 256, "conv_dim": 256, "conv_dim_out": 256,
                "layer_types": ["conv", "full_attention"] * 2}
_FULL = ["sliding_attention", "full_attention"] * 2
BESIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _DEEPSEEK), "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {**_DEEPSEEK, "first_k_dense_replace": 1}, "falcon_h1": {"mamba_d_ssm": 512, **_MAMBA},
    "granitemoehybrid": _MAMBA, "nemotron_h": {"mamba_num_heads": 32, "mamba_head_dim": 16,
                                               "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "gemma4_text": {"num_experts": None}, "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _FULL},
    "lfm2": _CONVOLUTION, "lfm2_moe": _CONVOLUTION,
    "minimax_m2": {"rotary_dim": 32, "use_routing_bias": True, "scoring_func": "sigmoid"}}
"""What single families need, instead of families.py's, also what files have and transformers no longer
writes."""


def make(model_type: str, folder: Path) -> None:
    """A family's checkpoints, the beginning of its row, and what vLLM's answers are compared with."""
    import families
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    from quantkit.testing.tiny import tiny_tokenizer

    families.SMALL.update(LARGER)
    families.BESIDES.update(BESIDES)
    kind = AutoModelForCausalLM if model_type in CAUSAL else AutoModelForImageTextToText
    tokens = torch.randint(8, 500, (4, 48), generator=torch.Generator().manual_seed(1))
    made: dict[str, Any] = {"row": {}, "expected": {}, "prompts": tokens.tolist()}
    try:
        torch.manual_seed(0)
        model = kind.from_config(families.tiny_config(model_type)).to(torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(folder / PLAIN)
        tiny_tokenizer().save(str(folder / PLAIN / "tokenizer.json"))
        made["expected"][PLAIN] = _of_tokens(families._logits(kind, folder / PLAIN, tokens), tokens)
        for recipe in RECIPES:
            made["row"][recipe], logprobs = _quantized(folder / PLAIN, folder / recipe, recipe, tokens)
            made["expected"][recipe] = _of_tokens(logprobs, tokens)
    except Exception as error:  # whatever is said
        made["row"].setdefault(PLAIN, {})["made"] = _short(error)
    (folder / "made.json").write_text(json.dumps(made))


def _quantized(plain: Path, out: Path, recipe: str, tokens: Any) -> tuple[dict[str, Any], Any]:
    """What is quantized of it, and log-probabilities by what its file says."""
    import families

    from quantkit.quantization.recipe import load_recipe
    from quantkit.quantization.run import quantize
    from quantkit.runtime import modules_model

    result = quantize(str(plain), load_recipe(recipe).model_copy(update={"engine": "vllm"}), out)
    if (record := result.plan.outline_record) is None:
        raise ValueError("a family that quantkit knows")
    modules_model.plain_source = modules_model.DequantizedCheckpoint  # that of rounded inputs, too
    ours = modules_model.load_through_modules(str(out), dtype="float32")
    share = record.quantized / (record.quantized + sum(record.kept.values()))
    return {"quantized": share, "kept": record.kept}, families._ours(ours, tokens)


def _of_tokens(logprobs: Any, tokens: Any) -> list[float]:
    """Of each token but a prompt's first, its log-probability."""
    values: list[float] = logprobs[:, :-1].gather(-1, tokens[:, 1:, None]).flatten().tolist()
    return values


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def serve() -> None:
    """In vLLM's environment: reads families' checkpoints, each family in a process of its own, and one more
    for what is behind a checkpoint that ends it."""
    import torch
    import vllm.v1.worker.cpu_worker
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.models import registry

    torch.cpu._init_amx()
    registry._run_in_subprocess = lambda inspect: inspect()
    for kernel in (cpu_moe.CPUExpertsInt4, cpu_moe.CPUExpertsInt8):
        kernel._supports_routing_method = staticmethod(lambda *_: True)
    done = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where vLLM logs
    for line in sys.stdin:
        folder = Path(json.loads(line))
        made = json.loads((folder / "made.json").read_text())
        while missing := [name for name in made["expected"] if not (folder / f"{name}.json").exists()]:
            process = multiprocessing.get_context("fork").Process(target=_read, args=(
                vllm, folder, missing, made["prompts"]))
            process.start()
            process.join(SECONDS)
            process.kill()
            if not (answer := folder / f"{missing[0]}.json").exists():
                answer.write_text(json.dumps(f"its process ended with {process.exitcode}"))
        print(folder, file=done, flush=True)


def _read(vllm: Any, folder: Path, names: list[str], prompts: list[list[int]]) -> None:
    """Log-probabilities of the prompts' tokens by each checkpoint, or why there are none."""
    for name in names:
        answer: list[float] | str
        llm = None
        try:
            llm = vllm.LLM(model=str(folder / name), dtype="bfloat16", max_model_len=256, enforce_eager=True,
                           skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=4)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], vllm.SamplingParams(
                max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False), use_tqdm=False)
            answer = [at[token].logprob for output in outputs for at, token in zip(
                output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)]
        except Exception as error:  # whatever vLLM says
            traceback.print_exc()
            answer = _short(error)
        failed = name == PLAIN and isinstance(answer, str)
        for answered in names if failed else [name]:
            (folder / f"{answered}.json").write_text(json.dumps(answer))
        if failed:
            return
        del llm
        vllm.distributed.cleanup_dist_env_and_memory()


def measure(reader: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """The row of one family, whose checkpoints were made."""
    assert reader.stdin is not None and reader.stdout is not None
    if not (folder / "made.json").exists():
        return {PLAIN: {"made": f"not within {SECONDS} s, or its process ended"}}
    made = json.loads((folder / "made.json").read_text())
    row: dict[str, Any] = made["row"]
    print(json.dumps(str(folder)), file=reader.stdin, flush=True)
    reader.stdout.readline()
    for name, expected in made["expected"].items():
        answer = json.loads((folder / f"{name}.json").read_text())
        if isinstance(answer, str):
            row.setdefault(name, {})["vllm"] = answer
            if name == PLAIN:
                return {PLAIN: {"vllm": f"can't run it unquantized: {answer}"}}
            continue
        sides = {"plain_gap": (answer, made["expected"][PLAIN])} | ({} if name == PLAIN else {
            "file_gap": (answer, expected), "quantization_gap": (expected, made["expected"][PLAIN])})
        row[name] = {"vllm": "runs", **row.get(name, {}), **{
            key: sum(abs(a - b) for a, b in zip(*both, strict=True)) / len(answer)
            for key, both in sides.items()}}
    return row


def _made(model_type: str, folder: Path) -> Path:
    folder.mkdir()
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, __file__, "--make", model_type, str(folder)], timeout=SECONDS,
                       capture_output=True)
    return folder


def main(python: str, out: Path, wanted: list[str]) -> None:
    import families

    rows = json.loads(out.read_text()) if out.exists() else {}
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
    reader = subprocess.Popen([python, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, env=env)
    names = wanted or [name for name in FAMILIES if name not in rows]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(1) as maker:  # the next while vLLM reads
        for name, folder in zip(names, maker.map(_made, names, (Path(work, name) for name in names)),
                                strict=True):
            rows[name] = measure(reader, folder)
            shutil.rmtree(folder)
            families.write_rows(out, rows)
            print(name, json.dumps(rows[name]), flush=True)
    reader.communicate()


if __name__ == "__main__":
    if sys.argv[1] == "--make":
        make(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1] == "--serve":
        serve()
    else:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
