"""Registers the built-ins through the same hooks that other plugins use. Targets are imported lazily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from quantkit.plugins.hooks import Register, hookimpl

TARGETS: dict[str, dict[str, str]] = {
    "sources": {"synthetic": "models.synthetic:KIND",
                **{name: f"sources.{name}:KIND" for name in ("package", "gguf", "local", "hub")}},
    "architectures": {name: f"models.families:{name.upper()}" for name in (
        "gemma2", "gemma3_text", "gpt_oss", "internlm3", "iquestcoder", "llama", "mimo", "ministral",
        "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "sdar")} | {
            f"a2d-{name}": f"models.families:A2D_{name.upper()}" for name in ("llama", "qwen2", "qwen3")},
    "methods": {
        "rtn": "quantization.methods.rounding:RTN", "nf4": "quantization.methods.rounding:NF4",
        "gptq": "quantization.methods.gptq:METHOD", "autoround": "quantization.methods.autoround:METHOD"},
    "transforms": {
        "awq": "quantization.transforms.channel_scales:AWQ",
        "smoothquant": "quantization.transforms.channel_scales:SMOOTHQUANT"},
    "formats": {
        "pack-quantized": "formats.pack_quantized:FORMAT", "bnb-nf4": "formats.bnb_nf4:FORMAT",
        "trellis": "formats.trellis:FORMAT", "bnb-int8": "formats.bnb_int8:FORMAT",
        "gptq": "formats.gptq:FORMAT", "gptq-v2": "formats.gptq:V2", "awq": "formats.awq:FORMAT",
        "mlx": "formats.mlx:FORMAT", "int-quantized": "formats.eight_bit:INT",
        "float-quantized": "formats.eight_bit:FLOAT", "fine-grained-fp8": "formats.eight_bit:FINE_GRAINED",
        "nvfp4-pack-quantized": "formats.fp4:NVFP4", "mxfp4-pack-quantized": "formats.fp4:MXFP4",
        **{f"gguf-{name.lower()}": f"formats.gguf_blocks:{name}" for name in (
            "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")}},
    "kernels": {
        **{f"triton-{name}": f"ops.triton_linear:{target}" for name, target in (
            ("w8a16", "W8"), ("w4a16", "W4"), ("nf4", "NF"), ("fp8", "FP"), ("w8a8", "INT"), ("fp4", "FP4"),
            ("w4a4", "FP4A4"), ("iq4", "IQ4"), ("trellis", "TRELLIS"))},
        **{f"cpu-{name}": f"ops.cpu_linear:{target}" for name, target in (
            ("int8", "INT8"), ("int4", "INT4"), ("nf4", "NF"), ("trellis", "TRELLIS"), ("w8a8", "INT"),
            ("fp8", "FP"), ("fp4", "FP4"), ("iq4", "IQ4"))},
        "reference": "ops.reference:REFERENCE"},
    "kv_policies": {
        "all": "kv.policies.window:KeepAll", "window": "kv.policies.window:WindowPolicy",
        "snapkv": "kv.policies.snapkv:SnapKV", "pyramidkv": "kv.policies.snapkv:PyramidKV",
        "adakv": "kv.policies.snapkv:AdaKV", "h2o": "kv.policies.decoding:H2O",
        "tova": "kv.policies.decoding:Tova", "expected": "kv.policies.query_agnostic:ExpectedAttention",
        "kvzip": "kv.policies.query_agnostic:KVzip"},
    "kv_codecs": {
        "none": "kv.codecs.per_token:PlainCodec", "bf16": "kv.codecs.per_token:BFloat16Codec",
        "int8": "kv.codecs.per_token:Int8Codec", "fp8": "kv.codecs.per_token:Fp8Codec",
        "int4": "kv.codecs.kivi:Int4Codec", "int3": "kv.codecs.kivi:Int3Codec",
        "int2": "kv.codecs.kivi:Int2Codec", "rotation": "kv.codecs.rotation:RotationCodec"},
    "drafters": {
        "ngram": "runtime.drafting.ngram:NgramDrafter", "model": "runtime.drafting.draft_model:ModelDrafter",
        "eagle3": "runtime.drafting.eagle3:Eagle3Drafter", "mtp": "runtime.drafting.mtp:MtpDrafter",
        "self": "runtime.drafting.draft_model:LowBitDrafter"},
    "metrics": {name: f"evaluation.metrics:{name.upper()}" for name in ("perplexity", "kl", "top1")},
    "reporters": {
        "table": "evaluation.report.table:REPORTER", "json": "evaluation.results_file:REPORTER",
        "markdown": "evaluation.report.markdown:REPORTER", "html": "evaluation.report.html:REPORTER",
        "junit": "evaluation.report.gates:REPORTER", "model_card": "evaluation.report.model_card:REPORTER",
        "svg": "evaluation.report.figure:SVG", "png": "evaluation.report.figure:PNG"},
}
"""Registry → name → target, without ``quantkit.`` in front."""


def _register_hook(targets: Mapping[str, str]) -> Callable[[Register], None]:
    @hookimpl
    def hook(register: Register) -> None:
        for name, target in targets.items():
            register(name, f"quantkit.{target}")

    return hook


globals().update({f"register_{key}": _register_hook(targets) for key, targets in TARGETS.items()})


@hookimpl
def register_commands(register: Register) -> None:
    for name, line in (
        ("demo", "Quantize a real small model three ways and measure what each cost."),
        ("auto", "Make a model fit into your memory with the least loss, and run it."),
        ("plan", "Choose weights and KV cache for an amount of memory, with the arithmetic."),
        ("quantize", "Quantize a model by a recipe into a checkpoint."),
        ("export", "Pack a checkpoint anew in another layout, exactly."),
        ("eval", "Compare models: perplexity, KL, top-1, speed and memory."),
        ("eval-long", "Compare KV cache settings at length: retrieval, positions, generated text."),
        ("compare", "Compare two results of eval, variant by variant."),
        ("generate", "Generate text from a model or a checkpoint."),
        ("chat", "Chat with a model in the terminal."),
        ("serve-local", "Serve a model on this machine: OpenAI's API and a page to chat."),
        ("inspect", "Show what a model or checkpoint holds, layer by layer."),
        ("verify", "Reread a checkpoint and check every hash and value."),
        ("push", "Upload a checkpoint to the Hugging Face hub."),
        ("recipes", "List and show recipes."),
        ("plugins", "List, make and check plugins."),
        ("bench", "Measure the CPU kernels, or how fast a model runs here."),
        ("doctor", "Show this machine, its kernels, and what is missing."),
    ):
        place = {"serve-local": "serve.command:command", "push": "export:push_command"}.get(
            name, f"{name.replace('-', '_')}:command")
        register(name, f"quantkit.cli.{place}", help=line)


@hookimpl
def recipe_dirs() -> list[Path]:
    from quantkit.support.paths import data_dir

    return [data_dir("recipes")]


@hookimpl
def eval_dirs() -> list[Path]:
    from quantkit.support.paths import data_dir

    return [data_dir("evals")]
