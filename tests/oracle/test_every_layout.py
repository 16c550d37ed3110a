"""Every layout in every engine that runs on a CPU: each does what its cell of docs/layouts.yaml says.

A tiny Llama is quantized to each layout. Each engine is asked which token is likeliest at every place of
quantkit's own greedy answer: the same one everywhere, the same one mostly where it computes otherwise, or
nothing where it refuses the files. Engines other than transformers live in environments of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.open import open_checkpoint
from quantkit.export.gguf.export import export_gguf
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.plugins.manager import registry
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from tests.helpers.layouts import LayoutCase, cases, generator, maker
from tests.helpers.mlx_peer import mlx_logits, with_mlx

pytestmark = pytest.mark.oracle
CASES = list(cases())
KIND_OF = generator().kind_of
PROMPT = torch.randint(4, 300, (8,), generator=torch.Generator().manual_seed(5)).tolist()
TOKENS = 24
REORDERED, HALF = 1e-3, 0.05
"""Logits as close as this may change places: in float32 by the order of sums, in float16 by rounding."""
MOSTLY, ROUNDED = 3 / 4, 1 / 3
"""Shares of equal tokens where an engine computes otherwise, and where a layout rounds inputs, some of them
to 4 bits. By chance it would be one in 300."""
GPTQ = os.environ.get("QUANTKIT_TEST_GPTQ", "")
VLLM = os.environ.get("QUANTKIT_TEST_VLLM", "")
GPTQ_SCRIPT = """
import json, sys
import torch, transformers
kinds = {"gptq": (transformers.GPTQConfig, "torch"), "awq": (transformers.AwqConfig, "torch_awq")}
config = transformers.AutoConfig.from_pretrained(sys.argv[1], local_files_only=True).quantization_config
kind, backend = kinds[config["quant_method"]]
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, local_files_only=True,
    quantization_config=kind(bits=config["bits"], backend=backend))
with torch.no_grad():
    logits = model(torch.tensor([json.loads(sys.argv[2])])).logits[0]
print("likeliest", json.dumps(logits.argmax(-1).tolist()))
"""
VLLM_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
def main():
    ids = json.loads(sys.argv[2])
    llm = LLM(model=sys.argv[1], dtype=sys.argv[3], max_model_len=128, enforce_eager=True,
              enable_prefix_caching=False)
    (answer,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(
        max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=1), use_tqdm=False)
    ranked = [next(token for token, score in place.items() if score.rank == 1)
              for place in answer.prompt_logprobs[1:]]
    print("likeliest", json.dumps([*ranked, answer.outputs[0].token_ids[0]]))
if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """``make[dtype](case)`` → a checkpoint of a model of that dtype."""
    return {dtype: maker(tmp_path_factory.mktemp(dtype), dtype) for dtype in ("bfloat16", "float32")}


@cache
def our_answer(folder: Path) -> tuple[list[int], torch.Tensor]:
    """The prompt with our answer, and our logits ``[length, vocabulary]``, with float32 activations."""
    loaded = load(str(folder), dtype="float32")
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    ids = PROMPT + generate(loaded, [PROMPT], sampling)[0].token_ids
    with torch.no_grad():
        return ids, loaded.model(torch.tensor([ids]))[0].float()


def agrees(case: LayoutCase, engine: str, folder: Path, likeliest: torch.Tensor | None,
           margin: float) -> None:
    """Checks an engine's likeliest tokens at the answer's places, ``None`` if it refuses, with its cell."""
    kind = KIND_OF(case.row[engine])
    assert (likeliest is None) == (kind in ("refused", "unrun"))
    if likeliest is None:
        return
    _, logits = our_answer(folder)
    best = logits[len(PROMPT):].topk(2)
    equal = likeliest[len(PROMPT):] == best.indices[:, 0]
    if kind == "loads" or case.rounds_inputs:
        assert equal.float().mean() >= (ROUNDED if case.rounds_inputs else MOSTLY)
    else:
        sure = best.values[:, 0] - best.values[:, 1] > margin
        assert equal[sure].all() and sure.float().mean() > 0.8


def cells(engine: str, *kinds: str, formats: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Cases whose cell is of one of these kinds, by default of all that run or are refused anywhere, and of
    one of these formats if given."""
    chosen = [case for case in CASES if KIND_OF(case.row[engine]) in (kinds or ("same", "loads", "refused"))
              and (not formats or case.rule["format"] in formats)]
    return pytest.mark.parametrize("case", chosen, ids=str)


@pytest.mark.sampled(8)
@cells("quantkit")
def test_quantkit(make, case):
    """Beside an ordinary float32 model of the weights that the format dequantizes."""
    folder = make["float32"](case)
    ids, _ = our_answer(folder)
    with open_checkpoint(folder) as opened:
        def tensor(name: str) -> torch.Tensor:
            packed = opened.quantized(name.removesuffix(".weight"))
            return opened.tensor(name) if packed is None else (
                registry("formats").get(packed.format).dequantize(packed))

        with torch.no_grad():
            plain = CausalLM(parse_config(opened.config()), Weights(tensor, lambda name: True, torch.float32))
            likeliest = plain(torch.tensor([ids]))[0].argmax(-1)
    agrees(case, "quantkit", folder, likeliest, REORDERED)


GPTQ_FORMATS = ("gptq", "gptq-v2", "awq")
OTHERS = tuple(sorted({case.rule["format"] for case in CASES} - set(GPTQ_FORMATS)))


def by_transformers(folder: Path, ids: list[int], **options) -> torch.Tensor | None:
    """The likeliest tokens; ``None`` where it fails, or where it takes random numbers for a weight."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **options)
            model.eval()(torch.tensor([ids]))  # decompresses
            likeliest = torch.nn.Module.float(model)(torch.tensor([ids])).logits[0].argmax(-1)
    except (ValueError, RuntimeError, KeyError, AttributeError):
        return None
    return None if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"] else likeliest


@pytest.mark.sampled(8)
@cells("transformers", formats=OTHERS)
def test_transformers(make, case):
    for package in ("compressed_tensors", "bitsandbytes", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra: oracle)")
    from transformers import CompressedTensorsConfig

    folder = make["bfloat16" if "fp4" in case.rule["format"] else "float32"](case)
    ids, _ = our_answer(folder)
    options = {}
    if "unless" in case.row["transformers"]:
        assert by_transformers(folder, ids) is None
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    agrees(case, "transformers", folder, by_transformers(folder, ids, **options), REORDERED)


def asked(python: str | Path, script: Path, *arguments: object, **environment: str) -> torch.Tensor | None:
    """The likeliest tokens that a script prints; ``None`` if the engine refuses."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **environment}
    done = subprocess.run([str(python), str(script), *map(str, arguments)], env=env, capture_output=True,
                          text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("likeliest ")]
    if done.returncode:
        output = done.stdout + done.stderr
        assert "ValueError: " in output or "ValidationError: " in output, output[-2000:]
        return None
    return torch.tensor(json.loads(lines[0].removeprefix("likeliest ")))


@pytest.mark.slow
@pytest.mark.skipif(not GPTQ, reason="QUANTKIT_TEST_GPTQ doesn't name the Python of an environment with "
                                     "transformers, optimum and gptqmodel")
@cells("transformers", formats=GPTQ_FORMATS)
def test_gptqmodel(make, case, tmp_path):
    (tmp_path / "ask.py").write_text(GPTQ_SCRIPT, encoding="utf-8")
    folder = make["bfloat16"](case)
    ids, _ = our_answer(folder)
    agrees(case, "transformers", folder, asked(GPTQ, tmp_path / "ask.py", folder, ids), REORDERED)


@with_mlx
@cells("mlx")
def test_mlx_lm(make, case, tmp_path):
    folder = make["float32"](case)
    ids, _ = our_answer(folder)
    try:
        likeliest = torch.from_numpy(mlx_logits(tmp_path, folder, [ids])[0]).argmax(-1)
    except AssertionError as error:
        assert "ValueError" in str(error) or "KeyError" in str(error), error
        likeliest = None
    agrees(case, "mlx", folder, likeliest, REORDERED)


@cells("gguf", "loads")
def test_llama_cpp(make, case, tmp_path, llama_cpp):
    folder = make["bfloat16"](case)
    ids, _ = our_answer(folder)
    with llama_cpp(export_gguf(str(folder), tmp_path / "m.gguf").out) as session:
        likeliest = session.predict([*ids, 0], 0).logits.argmax(-1)
    agrees(case, "gguf", folder, likeliest, REORDERED)


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="QUANTKIT_TEST_VLLM doesn't name vLLM's executable")
@cells("vllm", "same", "loads", "refused", "unrun")
def test_vllm(make, case, tmp_path):
    """In float16, which its kernels for rounded inputs don't have; what is for GPUs, a CPU refuses. It takes
    half a minute to start: of the cases of a row that it refuses, the first is tried."""
    cell = case.row["vllm"]
    if KIND_OF(cell) in ("refused", "unrun") and case.rule is not case.row["cases"][0]:
        pytest.skip("the row's first case is refused for the same reason, and vLLM takes half a minute")
    if "AMX" in cell.get("unrun", "") and "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this CPU has AMX: the case is that vLLM refuses it on CPUs without")
    (tmp_path / "ask.py").write_text(VLLM_SCRIPT, encoding="utf-8")
    folder = make["bfloat16"](case)
    ids, _ = our_answer(folder)
    dtype = "bfloat16" if case.rounds_inputs else "float16"
    likeliest = asked(Path(VLLM).with_name("python"), tmp_path / "ask.py", folder, ids, dtype,
                      VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0", VLLM_NO_USAGE_STATS="1",
                      VLLM_ENABLE_V1_MULTIPROCESSING="0")
    agrees(case, "vllm", folder, likeliest, HALF)
