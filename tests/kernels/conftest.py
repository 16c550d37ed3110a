"""Kernels run in Triton's interpreter here, unless there is a GPU: chosen before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
