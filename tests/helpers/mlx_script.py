"""What mlx and mlx-lm say, in an environment of their own: ``python mlx_script.py JOB OUT``.

JOB is an ``.npz`` file that :mod:`tests.helpers.mlx_peer` wrote, OUT the one that it reads. Nothing of
quantkit is imported here.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def as_numpy(array):
    return np.array(array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)


def quantize(job):
    """A weight → MLX's words, scales and biases."""
    names = ("weight", "scales", "biases")
    parts = mx.quantize(mx.array(job["weight"]).astype(getattr(mx, str(job["dtype"]))), int(job["size"]),
                        int(job["bits"]))
    return {name: as_numpy(part) for name, part in zip(names, parts, strict=True)}


def dequantize(job):
    """Words, scales and biases → the weight in float32."""
    parts = [mx.array(job[name]) for name in ("weight", "scales", "biases")]
    return {"weight": as_numpy(mx.dequantize(*parts, int(job["size"]), int(job["bits"])))}


def convert(job):
    """A model's folder → a quantized one, by ``mlx_lm.convert``."""
    mlx_lm.convert(str(job["plain"]), str(job["folder"]), quantize=True, q_bits=int(job["bits"]),
                   q_group_size=int(job["size"]), quant_predicate=str(job["mix"]) or None)
    return {}


def logits(job):
    """Token ids ``[n, length]`` → logits ``[n, length, vocabulary]``, in float32."""
    model, _ = load_model(Path(str(job["folder"])))
    model.set_dtype(mx.float32)
    return {"logits": as_numpy(model(mx.array(job["ids"])))}


def greedy(job):
    """Texts → their tokens and the likeliest ones after each, all by mlx-lm, in float32."""
    model, tokenizer = mlx_lm.load(str(job["folder"]))
    model.set_dtype(mx.float32)
    prompts = [tokenizer.encode(text) for text in json.loads(str(job["texts"]))]
    count = int(job["tokens"])
    tokens = [[int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
              for prompt in prompts]
    return {"prompts": json.dumps(prompts), "tokens": np.array(tokens)}


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    with np.load(sys.argv[1]) as job:
        np.savez(sys.argv[2], **globals()[str(job["what"])](job))
