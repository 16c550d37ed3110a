"""The whole comparison on a tiny model and its checkpoints."""

import json
import math
import re

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.run import EvalSettings, evaluate
from quantkit.evaluation.sweep.assemble import per_word
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model

KEYS = {"model", "method", "bits_per_weight", "file_bytes", "peak_bytes", "perplexity", "kl_mean", "top1",
        "prefill_tok_s", "decode_tok_s"}
QUALITY = EvalSettings(window=32, windows=4, speed=False)


def test_rows_have_the_promised_keys_and_sensible_values(tiny, int4):
    settings = EvalSettings(window=32, windows=4, prefill=40, decode=3, repeats=2, noise_floor=True)
    events = []
    result = evaluate([str(tiny), str(int4)], settings, events.append)
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert set(found) >= {"results", "protocol"}
    for row in found["results"]:
        assert set(row) >= KEYS and all(row[key] is not None for key in KEYS)
        for low, high in row["intervals"].values():
            assert low <= high
    reference, four = found["results"]
    assert reference["kl_mean"] == 0 and reference["top1"] == 1 and reference["bits_per_weight"] == 16
    assert [row["model"] for row in found["results"]] == [str(tiny), str(int4)]
    assert found["protocol"]["window"] == 32 and found["protocol"]["windows"] == 4
    assert found["protocol"]["scored"] == 4 * 31 and found["protocol"]["dtype"] == "bfloat16"
    assert 0 < found["noise_floor_kl"]["value"] == reference["kl_exact"] < four["kl_exact"]
    assert four["kl_exact"] == pytest.approx(four["kl_mean"], rel=0.2)
    assert events[-1].done == events[-1].total


def test_quality_is_the_same_twice_and_speed_can_be_left_out(tiny, int8, int4):
    one, two = (evaluate([str(tiny), str(int8), str(int4)], QUALITY).to_dict() for _ in range(2))
    reference, eight, four = one["results"]
    assert reference["kl_mean"] == 0 < eight["kl_mean"] < four["kl_mean"]
    assert 4 < four["bits_per_weight"] < 5 and 8 < eight["bits_per_weight"] < 9
    assert four["file_bytes"] < eight["file_bytes"] < reference["file_bytes"]
    assert "int8" in eight["method"] and "int4" in four["method"]
    for result in (one, two):
        for row in result["results"]:
            assert set(row.pop("measured")) == {"quality"}
    assert one == two
    assert one["results"][0]["decode_tok_s"] is None and one["results"][0]["peak_bytes"] is None
    assert one["protocol"]["repeats"] == 0


@pytest.mark.parametrize("bad", [{"window": 1}, {"windows": 0}, {"prefill": 0}, {"decode": 0},
                                 {"repeats": 0}])
def test_settings_that_make_no_sense(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        EvalSettings(**bad)


def test_models_that_cannot_be_compared(tiny, tmp_path):
    with pytest.raises(UsageError, match="twice"):
        evaluate([str(tiny), str(tiny)], QUALITY)
    with pytest.raises(UsageError, match="no model"):
        evaluate([], QUALITY)
    with pytest.raises(QuantkitError):
        evaluate([str(tiny), str(tmp_path / "nowhere")], QUALITY)
    other = tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:3]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="tokens"):
        evaluate([str(tiny), str(other)], QUALITY)


def test_a_speed_test_longer_than_the_context_is_refused_before_any_work(tiny):
    events = []
    with pytest.raises(UsageError) as caught:
        evaluate([str(tiny)], EvalSettings(window=32, windows=2, prefill=500, decode=20), events.append)
    assert "--prefill" in caught.value.next and not events


def test_perplexity_a_word():
    found = per_word(Interval(10.0, 9.0, 11.0), 1.5)
    assert found.value == pytest.approx(10 ** 1.5) and found.low < found.value < found.high
    assert per_word(Interval(1e300, 1.0, 1e308), 3).value == math.inf


def test_memory_is_said_before_a_weight_is_read(tiny, int8):
    said = []
    with pytest.raises(KeyboardInterrupt):
        evaluate([str(tiny), str(int8)], QUALITY, announce=lambda text: said.append(text) or _stop())
    assert re.match(r"this takes about [\d.]+ [MG]B of memory; until it ends, [\d.]+ kB of disk", said[0])


def _stop():
    raise KeyboardInterrupt


def test_the_runs_that_are_told_are_those_that_were_made(tiny):
    result = evaluate([str(tiny)], EvalSettings(window=32, windows=2, prefill=16, decode=2, repeats=5))
    runs = result.rows[0].speed.prefill[0].runs
    assert result.protocol.runs == (runs, runs) and 3 <= runs <= 5 and result.protocol.repeats == 5
    assert f"median of {runs} runs" in " ".join(result.protocol.lines())


def test_a_gguf_reference_is_compared_with_activations_as_they_are(tmp_path):
    from quantkit.export.gguf.export import export_gguf
    from quantkit.quantization.run import quantize

    quantize(str(tiny_model(tmp_path / "plain")), "gguf-q4_0", tmp_path / "quantized")
    export_gguf(str(tmp_path / "quantized"), tmp_path / "m.gguf")
    row, blocks = evaluate([str(tmp_path / "m.gguf"), str(tmp_path / "quantized")], QUALITY).rows
    assert row.file_bytes == (tmp_path / "m.gguf").stat().st_size > row.weight_bytes and row.method == "Q4_0"
    assert row.bits_per_weight == 4.5
    assert blocks.metrics["kl_mean"].value > 0, "the same blocks, by activations that are rounded"
