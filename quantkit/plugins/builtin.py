"""Registers the built-ins through the same hooks that other plugins use. Targets are imported lazily."""

from __future__ import annotations

from pathlib import Path

from quantkit.plugins.hooks import Register, hookimpl


@hookimpl
def register_sources(register: Register) -> None:
    register("synthetic", "quantkit.sources.synthetic:KIND")
    register("package", "quantkit.sources.package:KIND")
    register("gguf", "quantkit.sources.gguf:KIND")
    register("local", "quantkit.sources.local:KIND")
    register("hub", "quantkit.sources.hub:KIND")


@hookimpl
def register_architectures(register: Register) -> None:
    for name in ("gemma2", "gemma3_text", "gpt_oss", "llama", "mimo", "mistral", "mixtral", "phi3", "qwen2",
                 "qwen3", "qwen3_moe"):
        register(name, f"quantkit.models.families:{name.upper()}")


@hookimpl
def register_methods(register: Register) -> None:
    register("rtn", "quantkit.quantization.methods.rounding:RTN")
    register("nf4", "quantkit.quantization.methods.rounding:NF4")
    register("gptq", "quantkit.quantization.methods.gptq:METHOD")
    register("autoround", "quantkit.quantization.methods.autoround:METHOD")


@hookimpl
def register_transforms(register: Register) -> None:
    register("awq", "quantkit.quantization.transforms.channel_scales:AWQ")
    register("smoothquant", "quantkit.quantization.transforms.channel_scales:SMOOTHQUANT")


@hookimpl
def register_formats(register: Register) -> None:
    register("pack-quantized", "quantkit.formats.pack_quantized:FORMAT")
    register("bnb-nf4", "quantkit.formats.bnb_nf4:FORMAT")
    register("trellis", "quantkit.formats.trellis:FORMAT")
    register("bnb-int8", "quantkit.formats.bnb_int8:FORMAT")
    register("gptq", "quantkit.formats.gptq:FORMAT")
    register("gptq-v2", "quantkit.formats.gptq:V2")
    register("awq", "quantkit.formats.awq:FORMAT")
    register("mlx", "quantkit.formats.mlx:FORMAT")
    register("int-quantized", "quantkit.formats.eight_bit:INT")
    register("float-quantized", "quantkit.formats.eight_bit:FLOAT")
    register("fine-grained-fp8", "quantkit.formats.eight_bit:FINE_GRAINED")
    register("nvfp4-pack-quantized", "quantkit.formats.fp4:NVFP4")
    register("mxfp4-pack-quantized", "quantkit.formats.fp4:MXFP4")
    for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"):
        register(f"gguf-{name.lower()}", f"quantkit.formats.gguf_blocks:{name}")


@hookimpl
def register_kernels(register: Register) -> None:
    for name, target in (("w8a16", "W8"), ("w4a16", "W4"), ("nf4", "NF"), ("fp8", "FP"), ("w8a8", "INT"),
                         ("fp4", "FP4"), ("w4a4", "FP4A4"), ("iq4", "IQ4")):
        register(f"triton-{name}", f"quantkit.ops.triton_linear:{target}")
    for name, target in (("int8", "INT8"), ("int4", "INT4"), ("nf4", "NF"), ("trellis", "TRELLIS"),
                         ("w8a8", "INT"), ("fp8", "FP"), ("fp4", "FP4"), ("iq4", "IQ4")):
        register(f"cpu-{name}", f"quantkit.ops.cpu_linear:{target}")
    register("reference", "quantkit.ops.reference:REFERENCE")


@hookimpl
def register_kv_policies(register: Register) -> None:
    register("all", "quantkit.kv.policies.window:KeepAll")
    register("window", "quantkit.kv.policies.window:WindowPolicy")
    register("snapkv", "quantkit.kv.policies.snapkv:SnapKV")
    register("pyramidkv", "quantkit.kv.policies.snapkv:PyramidKV")
    register("adakv", "quantkit.kv.policies.snapkv:AdaKV")
    register("h2o", "quantkit.kv.policies.decoding:H2O")
    register("tova", "quantkit.kv.policies.decoding:Tova")
    register("expected", "quantkit.kv.policies.query_agnostic:ExpectedAttention")
    register("kvzip", "quantkit.kv.policies.query_agnostic:KVzip")


@hookimpl
def register_kv_codecs(register: Register) -> None:
    register("none", "quantkit.kv.codecs.per_token:PlainCodec")
    register("bf16", "quantkit.kv.codecs.per_token:BFloat16Codec")
    register("int8", "quantkit.kv.codecs.per_token:Int8Codec")
    register("fp8", "quantkit.kv.codecs.per_token:Fp8Codec")
    register("int4", "quantkit.kv.codecs.kivi:Int4Codec")
    register("int3", "quantkit.kv.codecs.kivi:Int3Codec")
    register("int2", "quantkit.kv.codecs.kivi:Int2Codec")
    register("rotation", "quantkit.kv.codecs.rotation:RotationCodec")


@hookimpl
def register_drafters(register: Register) -> None:
    register("ngram", "quantkit.runtime.drafting.ngram:NgramDrafter")
    register("model", "quantkit.runtime.drafting.draft_model:ModelDrafter")
    register("eagle3", "quantkit.runtime.drafting.eagle3:Eagle3Drafter")
    register("mtp", "quantkit.runtime.drafting.mtp:MtpDrafter")
    register("self", "quantkit.runtime.drafting.draft_model:LowBitDrafter")


@hookimpl
def register_metrics(register: Register) -> None:
    for name in ("perplexity", "kl", "top1"):
        register(name, f"quantkit.evaluation.metrics:{name.upper()}")


@hookimpl
def register_reporters(register: Register) -> None:
    register("table", "quantkit.evaluation.report.table:REPORTER")
    register("json", "quantkit.evaluation.results_file:REPORTER")
    register("markdown", "quantkit.evaluation.report.markdown:REPORTER")
    register("html", "quantkit.evaluation.report.html:REPORTER")
    register("junit", "quantkit.evaluation.report.gates:REPORTER")
    register("model_card", "quantkit.evaluation.report.model_card:REPORTER")
    register("svg", "quantkit.evaluation.report.figure:SVG")
    register("png", "quantkit.evaluation.report.figure:PNG")


@hookimpl
def register_commands(register: Register) -> None:
    for name, line in (
        ("demo", "Quantize a real small model three ways and measure what each cost."),
        ("plan", "Choose weights and KV cache for an amount of memory, with the arithmetic."),
        ("quantize", "Quantize a model by a recipe into a checkpoint."),
        ("export", "Pack a checkpoint anew in another layout, exactly."),
        ("eval", "Compare models: perplexity, KL, top-1, speed and memory."),
        ("eval-long", "Compare KV cache settings at length: retrieval, positions, generated text."),
        ("compare", "Compare two results of eval, variant by variant."),
        ("generate", "Generate text from a model or a checkpoint."),
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
    from quantkit.support.resources import data_dir

    return [data_dir("recipes")]


@hookimpl
def eval_dirs() -> list[Path]:
    from quantkit.support.resources import data_dir

    return [data_dir("evals")]
