"""The GPU runtime runs in Triton's interpreter here, unless there is a GPU."""

import pytest
import torch

from quantkit.ops import gpu
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model
from tests.helpers.triton_interpreter import interpreted, poisoned

__all__ = ["interpreted", "poisoned"]

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "dtype": "float32"}


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def loaded(request, tmp_path, monkeypatch):
    """A tiny model through the kernels."""
    folder = str(tiny_model(tmp_path / "m", **SMALL))
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        return load(folder, dtype="bfloat16", device="cuda")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the kernels run on it instead")
    monkeypatch.setattr(gpu, "SIMULATE", True)
    return load(folder, dtype="float16", device="cpu")
