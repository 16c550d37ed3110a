"""A tiny Llama in memory, and the shortest way from it to a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.manifest import Manifest, SourceRecord
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.solve import with_input_factor
from quantkit.sources.base import SourceIdentity, TensorInfo
from quantkit.testing import tiny_tokenizer

HIDDEN, INTER, VOCAB, LAYERS, KV = 64, 128, 96, 2, 32
SHAPES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN),
          "self_attn.v_proj": (KV, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
          "mlp.gate_proj": (INTER, HIDDEN), "mlp.up_proj": (INTER, HIDDEN), "mlp.down_proj": (HIDDEN, INTER)}


class TinySource:
    """A ``ModelSource`` with seeded weights."""

    uri = "/somewhere/private/tiny"

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(0)
        shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            shapes |= {f"{prefix}{name}.weight": shape for name, shape in SHAPES.items()}
            shapes |= {f"{prefix}{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
        if not tied:
            shapes["lm_head.weight"] = (VOCAB, HIDDEN)
        self.weights = {n: torch.randn(s, generator=random).to(dtype) for n, s in shapes.items()}
        self._config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
            "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": tied,
            "torch_dtype": str(dtype).removeprefix("torch.")}

    def config(self):
        return dict(self._config)

    def tensors(self):
        return {n: TensorInfo(n, tuple(t.shape), t.dtype) for n, t in self.weights.items()}

    def tensor(self, name):
        return self.weights[name]

    def side_files(self):
        return {"tokenizer.json": tiny_tokenizer().to_str().encode(),
                "chat_template.jinja": b"{{ messages }}"}

    def identity(self):
        return SourceIdentity("local", self.uri, files={"model.safetensors": "0" * 64})

    def close(self):
        pass


class Tiny:
    """The source, and what a quantization run would hand to the writer."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        self.source = TinySource(tied, dtype)

    def plan(self, *rules: dict):
        return make_plan(Recipe.model_validate({"name": "tiny", "rules": list(rules)}), self.source)

    def units(self, plan):
        """unit → (tensors, rows), every layer quantized as planned."""
        methods, formats = registry("methods"), registry("formats")
        units = {f"model.layers.{i}": ({}, []) for i in range(LAYERS)} | {"rest": ({}, [])}

        def unit(name):
            return units["rest" if not name.startswith("model.layers.") else ".".join(name.split(".")[:3])]

        for row in plan.rows:
            tensors, rows = unit(row.name)
            weight = self.source.tensor(f"{row.name}.weight")
            if row.method is None:
                tensors[f"{row.name}.weight"] = weight
                rows.append(row.recorded().to_dict())
                continue
            method, form = methods.get(row.method), formats.get(row.format)
            codes = method.run(weight.float(), None, row.spec, method.options(**row.options))
            codes = with_input_factor(codes, LayerStats(1, None, torch.full((row.shape[1],), 3.0)))
            packed = form.pack(codes, weight.dtype)
            tensors |= {f"{row.name}.{suffix}": t for suffix, t in packed.tensors.items()}
            error = (weight.float() - form.dequantize(packed)).norm() / weight.float().norm()
            rows.append(row.recorded(error=float(error), notes=codes.notes).to_dict())
        for name in plan.other:
            unit(name)[0][name] = self.source.tensor(name)
        return units

    def manifest(self, plan):
        return Manifest(quantkit_version="0", recipe=plan.recipe.snapshot(), plugins={"quantkit": "0"},
                        source=SourceRecord.of(self.source.identity()))

    def write(self, out: Path, *rules: dict, **options) -> Path:
        """A whole run."""
        plan = self.plan(*rules)
        with CheckpointWriter(out, {"recipe": plan.recipe.snapshot()}, **options) as writer:
            for unit, (tensors, rows) in self.units(plan).items():
                writer.put(unit, tensors, rows)
            return writer.finish(self.source.config(), self.source.side_files(), self.manifest(plan))


def group(bits: int, size: int = 32, **more) -> dict:
    return {"bits": bits, "granularity": {"strategy": "group", "size": size}, **more}


NVFP4 = {"kind": "fp", "scale_dtype": "e4m3"} | group(4, 16)
MXFP4 = {"kind": "fp", "scale_dtype": "e8m0"} | group(4)
SQUARES = {"kind": "fp", "bits": 8, "granularity": {"strategy": "tile", "size": 32}, "activations": "group"}
RULES = {
    "int8": [{"match": "lm_head"},
             {"match": "*", "method": "rtn", "spec": {"bits": 8, "granularity": {"strategy": "channel"}}}],
    "int4": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": group(4)}],
    "int3-asym": [{"match": "*", "method": "rtn", "spec": group(3, symmetric=False)}],
    "mixed-bits": [{"match": "lm_head"}, {"match": "*.down_proj", "method": "rtn", "spec": group(8)},
                   {"match": "re:.*layers\\.0\\..*k_proj"},
                   {"match": "*", "method": "rtn", "spec": group(4)}],
    "nf4-nested": [{"match": "lm_head"},
                   {"match": "*", "method": "nf4", "spec": {
                       "kind": "nf", "bits": 4, "granularity": {"strategy": "block", "size": 64},
                       "scale_dtype": "float32", "nested": True}}],
    "gptq": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": group(4), "format": "gptq"}],
    "awq": [{"match": "lm_head"},
            {"match": "*", "method": "rtn", "spec": group(4, symmetric=False), "format": "awq"}],
    "mlx": [{"match": "lm_head", "method": "rtn", "format": "mlx", "spec": group(6)},
            {"match": "*.k_proj"},
            {"match": "*", "method": "rtn", "format": "mlx",
             "spec": group(4, symmetric=False, minimum=True)}],
    "bnb-int8": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "format": "bnb-int8",
                                        "spec": {"bits": 8, "granularity": {"strategy": "channel"}}}],
    "w8a8": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": {
        "bits": 8, "granularity": {"strategy": "channel"}, "activations": "token"}}],
    "fp8": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": {
        "kind": "fp", "bits": 8, "granularity": {"strategy": "channel"}, "activations": "token"}}],
    "fp8-weights": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": {
        "kind": "fp", "bits": 8, "granularity": {"strategy": "tensor"}}}],
    "nvfp4": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": NVFP4}],
    "nvfp4-a4": [{"match": "lm_head"},
                 {"match": "*", "method": "rtn", "spec": NVFP4 | {"activations": "group"}}],
    "mxfp4": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": MXFP4}],
    "mxfp4-a4": [{"match": "lm_head"},
                 {"match": "*", "method": "rtn", "spec": MXFP4 | {"activations": "group"}}],
    "fp8-squares": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": SQUARES}],
    "fine-grained-fp8": [{"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": SQUARES,
                                                "format": "fine-grained-fp8"}],
    "mixed-layouts": [{"match": "lm_head", "method": "rtn", "spec": group(8)},
                      {"match": "*.down_proj", "method": "rtn", "spec": {
                          "kind": "fp", "bits": 8, "granularity": {"strategy": "channel"}}},
                      {"match": "*", "method": "rtn", "spec": {
                          "bits": 8, "granularity": {"strategy": "channel"}, "activations": "token"}}],
    "mixed-formats": [{"match": "lm_head"}, {"match": "*.down_proj", "method": "rtn", "spec": group(4)},
                      {"match": "*", "method": "nf4", "spec": {
                          "kind": "nf", "bits": 4, "granularity": {"strategy": "block", "size": 64},
                          "scale_dtype": "float32"}}],
}


@pytest.fixture(scope="session")
def rules():
    return RULES


@pytest.fixture
def tiny():
    return Tiny()


@pytest.fixture
def make_tiny():
    return Tiny


@pytest.fixture(scope="session", params=sorted(RULES))
def written(request, tmp_path_factory):
    """(folder, Tiny, rules) of a checkpoint for each set of rules; not to be changed."""
    tiny, folder = Tiny(), tmp_path_factory.mktemp("written") / request.param
    return tiny.write(folder, *RULES[request.param]), tiny, RULES[request.param]
