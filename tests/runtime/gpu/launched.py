"""Every launch of whole models, as a GPU would be given it: specialized for its arguments, compiled, not run.

``python tests/runtime/gpu/launched.py --target sm_90 --kv none,int8 --recipe int4-rtn --early``, in a
process of its own: tensors lie on the CPU and claim to be elsewhere, and Triton's driver is one that only
takes note. Prints JSON: ``launches`` of each kernel, those that begin ``early``, and ``faults``: kernels that
spill registers or touch some that the tensor cores still use, and their constants. What they would have
computed is whatever lay in memory; no token is read from it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from quantkit.formats.trellis_code import LEARNED
from quantkit.kv.spec import parse_kv, split_settings
from quantkit.ops import cpu_linear, cpu_machine, gpu
from quantkit.quantization.run import quantize
from quantkit.runtime import sampler
from quantkit.runtime.engine import Engine
from quantkit.runtime.gpu import prompts
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model
from quantkit_kernels import tuned
from quantkit_kernels.tools.assembly import machine_code
from quantkit_kernels.tools.cases.case import FAMILIES, SHARED
from quantkit_kernels.triton import dependent

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
         "hidden_size": 256, "intermediate_size": 384, "dtype": "bfloat16", "max_position_embeddings": 8192}
TARGETS = [target for target in FAMILIES if target.startswith("sm_")]
MOST_PROGRAMS = (2**31, 65536, 65536)
PROMPTS = ((3, {}), (70, {"temperature": 0.7, "seed": 1}),
           (4200, {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 2, "max_tokens": 2}))
"""Of which the longest, with more splits than are joined at once, ends before the others."""


class Driver:
    """A GPU that takes everything and does nothing."""

    def __init__(self, target: str) -> None:
        self._target, self.utils = target, self
        self.launches: Counter[str] = Counter()
        self.early: Counter[str] = Counter()
        self.faults: set[str] = set()
        self._constants: dict[str, str] = {}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self._target.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self._target], "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int,
                    device: int) -> tuple[int, int, int, int, int]:
        facts = machine_code(kernel, shared)
        if facts.spills or facts.hazards:
            self.faults.add(f"{name} {facts.spills} spills, {facts.hazards}: {self._constants}")
        return 1, 1, facts.registers, facts.spills, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        names = source.fn.arg_names
        self._constants = {names[at]: str(value) for (at, *_), value in source.constants.items()}

        def launch(*arguments: Any) -> None:
            assert all(0 < size < most for size, most in zip(arguments, MOST_PROGRAMS)), arguments[:3]
            self.launches[source.fn.__name__] += 1
            self.early[source.fn.__name__] += metadata.launch_pdl

        return launch


def elsewhere(target: str) -> Driver:
    """From now on kernels take tensors of the CPU for those of a GPU."""
    taken = Driver(target)
    driver.set_active(taken)
    torch.Tensor.is_cuda = property(lambda self: True)
    gpu.reason_against = lambda device, dtype: None
    for module in (cpu_machine, cpu_linear):
        module.reason_against_kernels = lambda: "there is a GPU"
    prompts._proven_sizes = lambda *given: prompts.SIZES  # what isn't computed isn't the same twice
    drawn = sampler._drawn

    def sevens(logits: torch.Tensor, samplers: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, finite = drawn(logits, samplers)
        return torch.full_like(ids, 7), torch.ones_like(finite)

    sampler._drawn = sevens
    family = FAMILIES[target]
    for name, module in list(sys.modules.items()):
        if name.startswith("quantkit_kernels.triton."):
            for known, value in (("family_of", family), ("starts", family in dependent.FAMILIES)):
                if hasattr(module, known):
                    setattr(module, known, lambda device, value=value: value)
    return taken


def run(folder: Path, kv: str) -> None:
    """Prompts of several lengths, a few tokens of each, together."""
    loaded = load(str(folder), device="cpu")
    assert isinstance(loaded.model, GpuModel), loaded.fallback_reason
    engine = Engine(loaded, kv=parse_kv(kv), memory=64 << 20)
    tickets = [engine.submit([5 + at % 250 for at in range(size)],
                             Sampling(**{"max_tokens": 4, "ignore_eos": True, **how}))
               for size, how in PROMPTS]
    while engine.step():
        pass
    assert all(ticket.done for ticket in tickets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--kv", default="none")
    parser.add_argument("--recipe", default="none")
    parser.add_argument("--families", default="llama")
    parser.add_argument("--early", action="store_true")
    given = parser.parse_args()
    cpu_linear.fastest_window = lambda: LEARNED  # as where there is a GPU
    with tempfile.TemporaryDirectory() as name:
        folders = []
        for family in given.families.split(","):
            plain = tiny_model(Path(name) / family, family, **SHAPE)
            for recipe in given.recipe.split(","):
                folders.append(plain if recipe == "none" else plain.with_name(f"{family}-{recipe}"))
                if recipe != "none":
                    quantize(str(plain), recipe, folders[-1])
        taken = elsewhere(given.target)
        with tuned.trial({"pdl": 1}) if given.early else contextlib.nullcontext():
            for folder in folders:
                for kv in split_settings(given.kv):
                    run(folder, kv)
    early = sorted(name for name, count in taken.early.items() if count)
    print(json.dumps({"launches": taken.launches, "early": early, "faults": sorted(taken.faults)}))


if __name__ == "__main__":
    main()
