"""Results that no model had to run for, ordinary and awkward: what a reporter must be able to write."""

from __future__ import annotations

import math

from quantkit.evaluation.metric_table import MetricInfo, builtin_infos
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.protocol import Protocol
from quantkit.evaluation.result import EvalResult, ModelResult

ODD_NAMES = ("a|b", "two\nlines", "<script>alert('x')</script>", "=1+1", "模型/量化 ½",
             "`code` **bold** _x_ [y](z)", 'quote " and \\ backslash', "x" * 300, "tab\tand \x1b[31mred", "")


def sample_results() -> dict[str, EvalResult]:
    """Results by what is special about them, made anew at each call."""
    ordinary = [_reference(),
                _row("out/int8", "rtn int8 channel sym", 163, 28.8, 0.004, 45.0, 8.02),
                _row("out/int4", "gptq int4 g64 sym", 112, 37.0, 0.25, 48.0, 4.25)]
    results = {"ordinary": _result(ordinary)}
    results["one model"] = _result([_reference()])
    results["no model"] = _result([])
    results["without speed"] = _result([_row("smollm2", "bf16", 269, 28.7, 0.0, None, 16.0), _int8(None)])
    partly = [_reference(), _int8(None)]
    partly[1].metrics = {"perplexity": partly[1].metrics["perplexity"]}
    results["missing metrics"] = _result(partly)
    results["no metrics"] = _result([ModelResult("bare", "bf16", 16.0, 100)])
    tools = [_reference(), _row("smollm2", "bf16", 269, 28.7, 0.001, 30.0, 16.0),
             ModelResult("http://127.0.0.1:8000", "int8", None, None, tool="vLLM",
                         metrics={"top1": Interval(0.97, 0.96, 0.98)}),
             ModelResult("smollm2", "bitsandbytes nf4", None, None, tool="transformers 5.23.0")]
    tools[1].tool = "transformers 5.23.0"
    results["other tools"] = _result(tools)
    broken = [_reference(), _row("ruined", "rtn", 40, 1.0, 0.0, 50.0, 1.0)]
    broken[1].metrics |= {"perplexity": Interval(math.inf, 1e300, math.inf),
                          "kl_mean": Interval(math.nan, -math.inf, math.inf),
                          "top1": Interval(0.0, 0.0, 0.0)}
    results["infinite values"] = _result(broken)
    results["odd names"] = _result([_row(name, f"method {name}"[:60], 100 + 10 * i, 30.0 + i, 0.01 * i, 40.0,
                                         4.0) for i, name in enumerate(ODD_NAMES)])
    results["odd names"].rows[0].answer = "# not a title\n| not | a table |\n```\n\x1b[2J<b>"
    results["odd names"].question = "Why | `is` <it>?"
    cached = [_row(model, "bf16", 269, 28.7, 0.01 * i, 30.0, 16.0)
              for model in ("smollm2", "int8") for i in range(3)]
    for row, kv in zip(cached, ("none", "int8", "window(512, sinks=4)+int4") * 2):
        row.kv, row.kv_bytes, row.kv_bytes_per_token = kv, 11_796_480, 23_040
    results["KV settings"] = _result(cached)
    tasks = [_reference(), _int8()]
    for row in tasks:
        row.metrics |= {"arc_easy/acc": Interval(0.5, 0.45, 0.55), "lambada/perplexity": Interval(25, 20, 30),
                        "gsm8k/exact_match,strict-match": Interval(0.0, 0.0, 0.01)}
    results["tasks"] = _result(tasks)
    results["many models"] = _result([_row(f"model-{i}", "rtn", 100 + i, 30 + i, 0.001 * i, 40 + i, 4.0)
                                      for i in range(60)])
    plugins = _result([_reference(), _int8()])
    for number, row in enumerate(plugins.rows):
        row.metrics |= {f"plugin_{i}": Interval(number - i, number - i - 0.5, number - i + 0.5)
                        for i in range(6)}
    plugins.metrics |= {f"plugin_{i}": MetricInfo(f"plugin | {i}", ("%", "ms", "")[i % 3],
                                                  ("lower", "higher", "")[i % 3], "run", "quantkit-other")
                        for i in range(6)}
    results["metrics of plugins"] = plugins
    floor = _result([_reference(), _int8()])
    for row in floor.rows:
        row.metrics |= {"kl_exact": Interval(0.0011, 0.001, 0.0012), "word_perplexity": Interval(60, 50, 70)}
    results["noise floor"] = floor
    return results


def _result(rows: list[ModelResult]) -> EvalResult:
    protocol = Protocol(
        text="pydoc-topics-3.11", text_sha256="ab" * 32, tokens_sha256="cd" * 32, window=512, windows=8,
        words=3000, dtype="bfloat16", prefill=256, decode=24, repeats=3, quantkit="0.1.0", torch="2.13.0+cpu",
        cpu="Some(R) Processor with a Long Name @ 2.60GHz", cores=2, threads=2)
    return EvalResult(protocol, rows, metrics=builtin_infos(),
                      command="quantkit eval smollm2 'out/int 8' --kv 'none,window(512, sinks=4)'")


def _reference() -> ModelResult:
    return _row("smollm2", "bf16", 269, 28.7, 0.0, 30.0, 16.0)


def _int8(decode: float | None = 45.0) -> ModelResult:
    return _row("int8", "rtn", 163, 28.8, 0.1, decode, 8.0)


def _row(model: str, method: str, megabytes: float, perplexity: float, kl: float, decode: float | None,
         bits: float) -> ModelResult:
    def around(value: float, limit: float = math.inf) -> Interval:
        return Interval(value, value * 0.93, min(value * 1.08, limit))

    metrics = {"perplexity": around(perplexity), "kl_mean": around(kl), "top1": around(1 - kl, 1.0)}
    if decode is not None:
        metrics |= {"prefill_tok_s": around(10 * decode), "decode_tok_s": around(decode)}
    row = ModelResult(model, method, bits, int(megabytes * 1e6), metrics=metrics)
    if decode is not None:
        row.peak_bytes, row.load_s = int(7e8), 0.3
        row.kernels = {"prefill": {"torch": 210}, "decode": {"reference": 210}}
    return row
