"""A comparison of everything that can be measured: five models, three KV settings, four texts."""

from __future__ import annotations

import math
import random

from quantkit.evaluation.metric_table import MetricInfo, builtin_infos
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.protocol import Protocol
from quantkit.evaluation.result import EvalResult, ModelResult, PairedDifference, TokenDiff
from quantkit.evaluation.roofline.result import MachineCeilings, OperatorSpeed, Roofline
from quantkit.evaluation.speed.results import DecodeSpeed, MemoryUse, PrefillSpeed, SpeedSweep, Spread

# model, method, bits, megabytes, KL, perplexity, decode tok/s, prefill tok/s
MODELS = (("HuggingFaceTB/SmolLM2-360M-Instruct", "bf16", 16.0, 724, 0.0, 14.2, 19.6, 412),
          ("out/int8", "rtn int8 channel sym", 8.02, 410, 0.0031, 14.25, 36.0, 520),
          ("out/int4-g64", "gptq int4 g64 sym", 4.25, 262, 0.052, 14.9, 58.0, 498),
          ("out/nf4", "nf4 b64", 4.5, 271, 0.071, 15.2, 41.0, 420),
          ("out/budget-3.5", "budget 3.5 bits", 3.5, 236, 0.124, 16.1, 66.0, 471))
SETTINGS = (("none", 0.0, 1.0, 40_960), ("int8", 0.0006, 1.04, 21_760), ("int4", 0.012, 1.07, 12_160))
TEXTS = {"prose": 1.0, "code": 0.55, "dialogue": 1.3, "german": 2.1}
TASKS = {"arc_easy/acc": 0.682, "piqa/acc": 0.712, "hellaswag/acc_norm": 0.541, "lambada_openai/acc": 0.463}
CONTEXTS, BATCHES = (128, 1024, 4096), (1, 2, 4, 8)


def around(value: float, part: float = 0.06, top: float = math.inf) -> Interval:
    return Interval(value, value * (1 - part), min(value * (1 + part), top))


def spread_of(value: float) -> Spread:
    return Spread(median=value, low=value * 0.97, high=value * 1.02)


def rich_result() -> EvalResult:
    """Made anew at each call, the same each time."""
    tails = {"kl_median": MetricInfo("KL median", "nats", "lower"),
             "kl_p99": MetricInfo("KL 99%", "nats", "lower"),
             "kl_p999": MetricInfo("KL 99.9%", "nats", "lower"), "flips": MetricInfo("flips", "%", "lower")}
    protocol = Protocol(
        text="standard (4 texts)", text_sha256="ab" * 32, tokens_sha256="cd" * 32, window=512, windows=40,
        words=15_300, dtype="bfloat16", prefill=512, decode=64, repeats=5, quantkit="0.9.0",
        torch="2.13.0+cpu", cpu="Some(R) Processor with a Long Name @ 2.60GHz", cores=2, threads=2,
        prompt=256,
        tasks="arc_easy 400, piqa 400, hellaswag 400, lambada_openai 400")
    rows = [_row(index, model, setting) for index, model in enumerate(MODELS) for setting in SETTINGS]
    return EvalResult(
        protocol, rows, question="Why is the sky blue?", metrics=builtin_infos() | tails,
        command="quantkit eval HuggingFaceTB/SmolLM2-360M-Instruct --recipe int8,int4-g64,nf4,budget-3.5 "
                "--kv none,int8,int4 --suite standard --out report",
        suite="standard", floors={"kl_mean": Interval(0.0011, 0.001, 0.0013)},
        roofline=[_roofline("HuggingFaceTB/SmolLM2-360M-Instruct", "bf16", 2.0, "bf16"),
                  _roofline("out/int4-g64", "gptq int4 g64 sym", 0.53, "int8")],
        sensitivity=_sensitivity(), diff=_diff())


def _row(index: int, model: tuple[str, str, float, int, float, float, float, float],
         setting: tuple[str, float, float, int]) -> ModelResult:
    name, method, bits, megabytes, kl, perplexity, decode, prefill = model
    kv, kv_kl, kv_gain, kv_token = setting
    kl, decode = kl + kv_kl, decode * kv_gain
    flips = min(0.9, 0.55 * math.sqrt(kl))
    metrics = {"kl_mean": around(kl), "top1": around(1 - flips, 0.01, 1.0),
               "decode_tok_s": around(decode, 0.03),
               "perplexity": around(perplexity * (1 + kl / 2), 0.04), "prefill_tok_s": around(prefill, 0.02),
               "word_perplexity": around(2 * perplexity), "kl_median": around(0.2 * kl),
               "kl_p99": around(14 * kl),
               "kl_p999": around(40 * kl, 0.2), "flips": around(flips)}
    metrics |= {task: around(value * (1 - 0.25 * kl * (1 + number)), 0.05, 1.0)
                for number, (task, value) in enumerate(TASKS.items())}
    row = ModelResult(name, method, bits, megabytes * 1_000_000, peak_bytes=(megabytes + 480) * 1_000_000,
                      load_s=0.4, metrics=metrics,
                      kernels={"prefill": {"cpu int8": 224}, "decode": {"cpu q4": 224}},
                      answer="Light scatters: short waves more than long ones.", kv=kv,
                      kv_bytes_per_token=kv_token, kv_bytes=kv_token * 512)
    if index:
        row.recipe = name.removeprefix("out/")
    row.texts = {text: {"kl_mean": around(kl * factor), "perplexity": around(perplexity * factor),
                        "flips": around(min(1.0, flips * factor)), "kl_p99": around(14 * kl * factor)}
                 for text, factor in TEXTS.items()}
    if kl:
        row.differences = _differences(kl)
    row.speed = _sweep(megabytes, decode, prefill, kv_token, kv)
    return row


def _differences(kl: float) -> list[PairedDifference]:
    tests = [PairedDifference(metric="kl_mean", difference=kl, low=kl * 0.9, high=kl * 1.1, p=0.0001,
                              test="sign flips over windows", items=160, epsilon=0.005,
                              verdict="indistinguishable" if kl < 0.004 else "worse")]
    for number, (task, value) in enumerate(TASKS.items()):
        change = -0.25 * kl * (1 + number) * value
        tests.append(PairedDifference(
            metric=task, difference=change, low=change - 0.012, high=change + 0.011, p=0.2, items=400,
            test="McNemar, exact", epsilon=0.02, verdict="worse" if change < -0.012 else
            "undecided" if change < -0.006 else "indistinguishable"))
    return tests


def _sweep(megabytes: int, decode: float, prefill: float, kv_token: int, kv: str) -> SpeedSweep:
    weights = megabytes * 1_000_000
    cells = []
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context > 16_384:
                cells.append(DecodeSpeed(batch=batch, context=context,
                                         left_out="needs 3.1 GB, there are 2.0"))
                continue
            speed = decode * batch ** 0.8 / (1 + context * batch * kv_token / weights)
            cells.append(DecodeSpeed(batch=batch, context=context, tok_s=spread_of(speed),
                                     bytes_s=spread_of(weights * speed / batch), of_read=0.71 / batch ** 0.1,
                                     kv_bytes=context * kv_token))
    return SpeedSweep(
        decode=tuple(cells), gap_ms={"median": 1000 / decode, "p99": 1300 / decode}, load_s=0.4,
        prefill=tuple(PrefillSpeed(tokens=tokens, tok_s=spread_of(prefill / (1 + tokens / 20_000)),
                                   first_token_s=spread_of(tokens / prefill)) for tokens in CONTEXTS),
        memory=MemoryUse(weights=weights, workspace=48_000_000, steady=weights + 390_000_000,
                         peak=weights + 480_000_000,
                         kv_by_context=tuple((tokens, tokens * kv_token) for tokens in (*CONTEXTS, 32_768))),
        kernels={"decode": {"cpu": 224}}, read_bytes_s=38.4e9)


def _roofline(model: str, label: str, bytes_a_weight: float, arithmetic: str) -> Roofline:
    ceilings = MachineCeilings(read_bytes_s=38.4e9, operations_s={"bf16": 0.82e12, "int8": 1.7e12})
    peak, operators = ceilings.operations_s[arithmetic], []
    for name, weights in (("q+k+v", 1_536_000), ("o", 921_600), ("gate+up", 4_915_200), ("down", 2_457_600),
                          ("head", 47_185_920)):
        for rows in (1, 8, 64, 512):
            moved = int(weights * bytes_a_weight + rows * 4 * 1920)
            work = 2 * weights * rows
            predicted = max(moved / ceilings.read_bytes_s, work / peak)
            operators.append(OperatorSpeed(
                operator=name, arithmetic=arithmetic, rows=rows, bytes=moved, operations=work,
                seconds=spread_of(predicted / 0.78), predicted_s=predicted,
                bound="memory" if moved / ceilings.read_bytes_s >= work / peak else "compute",
                bound_from=24 if arithmetic == "bf16" else 12, layers=1 if name == "head" else 32))
    for context in (512, 4096):
        moved, work = context * 1280, context * 1280 * 3
        operators.append(OperatorSpeed(
            operator="attention", arithmetic="bf16", rows=1, context=context, bytes=moved, operations=work,
            seconds=spread_of(moved / 38.4e9 / 0.6), predicted_s=moved / 38.4e9, bound="memory", layers=32))
    return Roofline(model=model, label=label, ceilings=ceilings, operators=tuple(operators))


def _sensitivity() -> list[tuple[str, float]]:
    numbers = random.Random(0)
    kinds = {"self_attn.q_proj": 1.0, "self_attn.k_proj": 0.8, "self_attn.v_proj": 4.0,
             "self_attn.o_proj": 2.0,
             "mlp.gate_proj": 1.5, "mlp.up_proj": 2.0, "mlp.down_proj": 6.0}
    return [(f"model.layers.{layer}.{kind}", 1e-4 * factor * (0.3 + numbers.random())
             * (1 + 9 * (layer in (0, 1, 31))))
            for layer in range(32) for kind, factor in kinds.items()]


def _diff() -> TokenDiff:
    text = ("def mean(values):\n    \"\"\"The arithmetic mean.\"\"\"\n    total = sum(values)\n"
            "    if not values:\n"
            "\treturn 0.0\n    return total / len(values)\n\nLight scatters in air: short waves "
            "more than long "
            "ones, so the sky looks blue and the setting sun red. <script>alert('x')</script> "
            "& naïve café 模型.\n")
    tokens, word = [], ""
    for char in text:
        if word and (char in " \n\t(.:,)" or word[-1] in "\n\t("):
            tokens.append(word)
            word = ""
        word += char
    tokens.append(word)
    numbers = random.Random(1)
    kl = [abs(numbers.gauss(0, 1)) ** 5 * 0.02 for _ in tokens]
    expected = [(" blue", " green") if value > 0.1 else None for value in kl]
    return TokenDiff(text="code", reference="SmolLM2-360M-Instruct kv none", candidate="int4-g64 kv int4",
                     tokens=tuple(tokens), kl=tuple(kl), loss=tuple(value * 0.4 for value in kl),
                     expected=tuple(expected))
