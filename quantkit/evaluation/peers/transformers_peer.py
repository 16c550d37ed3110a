"""transformers as a row: ``transformers(PATH, quantization=bitsandbytes-nf4, python=VENV/bin/python)``."""

from __future__ import annotations

import sys
from typing import ClassVar, Literal

from pydantic import Field

from quantkit.evaluation.peers.base import Peer
from quantkit.evaluation.peers.worker_session import WorkerSession
from quantkit.text.tokenizer import Tokenizer

Quantization = Literal["none", "dequantize", "bitsandbytes-nf4", "bitsandbytes-fp4", "bitsandbytes-int8",
                       "torchao-int8", "torchao-int4"]


class TransformersPeer(Peer):
    """A model that transformers loads.

    Attributes:
        path: a folder, or a repository of the hub. Safetensors only; code of a repository is never run.
        quantization: done while loading; ``none``: as the files are, quantized or not; ``dequantize``: the
            weights of a compressed-tensors checkpoint are unpacked, without which transformers loads none
            that has zero points.
        dtype: of activations; ``auto``: the checkpoint's.
        device: ``cpu``, ``cuda``, ``cuda:1``.
        python: an interpreter that has transformers; empty: this one.
    """

    name: ClassVar[str] = "transformers"
    first: ClassVar[str] = "path"

    path: str = Field(min_length=1)
    quantization: Quantization = "none"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?|mps|xpu(:\d+)?)$")
    python: str = ""

    @property
    def uri(self) -> str:
        """The folder or repository."""
        return self.path

    def open(self, context: int, threads: int, tokenizer: Tokenizer) -> WorkerSession:
        """Load it in a process."""
        package = self.quantization.partition("-")[0]
        wanted = "transformers" if package in ("none", "dequantize") else f"transformers and {package}"
        options = self.model_dump(include={"path", "quantization", "dtype", "device"}) | {"threads": threads}
        return WorkerSession(
            self.name, self.python or sys.executable, "transformers_worker.py", options,
            f"check the path; the environment needs {wanted}, and python=VENV/bin/python names another one")
