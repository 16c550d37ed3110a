"""A model of shapes alone, and recipes for it: what plans are tested on."""

from __future__ import annotations

import torch

from quantkit.quantization.recipe import Recipe
from quantkit.sources.base import TensorInfo
from quantkit.testing import tiny_tokenizer

HIDDEN, INTER, VOCAB, LAYERS = 64, 96, 80, 3
CHANNEL8 = {"bits": 8, "granularity": {"strategy": "channel"}}
GROUP4 = {"bits": 4, "granularity": {"strategy": "group", "size": 32}}
THREE_LAYERS = {"model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32"}
"""A whole config, small enough to go through layer by layer beside an oracle."""
NF4 = {"kind": "nf", "bits": 4, "granularity": {"strategy": "block", "size": 64}, "scale_dtype": "float32"}
HEAD = {"match": "lm_head"}
PER_LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INTER
TOKENIZER = tiny_tokenizer().to_str().encode()


class Source:
    """Shapes only: a plan reads no weight, and this one has none to give."""

    uri = "tiny"

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype, self.changed, self.settings = dtype, {}, {}
        self.tied = tied

    def config(self):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
                "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
                "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
                "tie_word_embeddings": self.tied, "torch_dtype": "bfloat16"} | self.settings

    def tensors(self):
        shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
        if not self.tied:
            shapes["lm_head.weight"] = (VOCAB, HIDDEN)
        for layer in range(LAYERS):
            p = f"model.layers.{layer}."
            shapes |= {f"{p}input_layernorm.weight": (HIDDEN,),
                       f"{p}post_attention_layernorm.weight": (HIDDEN,),
                       f"{p}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
                       f"{p}self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
                       f"{p}self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
                       f"{p}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
                       f"{p}mlp.gate_proj.weight": (INTER, HIDDEN), f"{p}mlp.up_proj.weight": (INTER, HIDDEN),
                       f"{p}mlp.down_proj.weight": (HIDDEN, INTER)}
        infos = {name: TensorInfo(name, shape, self.dtype) for name, shape in shapes.items()}
        infos |= self.changed
        return {name: info for name, info in infos.items() if info is not None}

    def tensor(self, name):
        raise AssertionError("a plan reads no weight")

    def side_files(self):
        return {"tokenizer.json": TOKENIZER}


def recipe(*rules: dict, **more) -> Recipe:
    return Recipe.model_validate({"name": "mine", "rules": list(rules), **more})


def every(method: str | None = "rtn", spec: dict | None = None, **more) -> dict:
    return {"match": "*", "method": method, "spec": spec or CHANNEL8, **more}
