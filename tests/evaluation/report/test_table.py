"""The terminal table: 80 columns, whatever is in it, and nothing left out."""

import math
import shlex
import subprocess
from unicodedata import east_asian_width

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.table import render


def columns(line):
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in line)


def test_every_number_and_its_interval_is_there(make_result, make_row):
    text = render(make_result([make_row("org/model", ppl=28.8, kl=0.004, top1=0.5)]))
    for piece in ("model · rtn int8 channel sym", "8.02", "163 MB", "700 MB", "28.8", "26.8–31.1", "0.00400",
                  "0.00372–0.00432", "50.0%", "46.5–54.0", "410", "381–443", "45.0", "41.9–48.6"):
        assert piece in text
    head = text.splitlines()[2:4]
    for word in ("bits/", "weight", "file", "peak", "perplexity", "KL", "top-1", "prefill", "decode",
                 "tok/s"):
        assert word in " ".join(head)


def test_columns_line_up(make_result):
    lines = render(make_result()).splitlines()
    ends = [next(line.index("top-1") + 5 for line in lines if "top-1" in line)]
    ends += [line.index("%") + 1 for line in lines if "%" in line and " MB " in line]
    assert len(ends) == 5 and len(set(ends)) == 1


@pytest.mark.parametrize("name", ["x" * 300, "some/" + "very-" * 20 + "long", "模型" * 60, "a\tb\x1b[31mc"])
def test_never_wider_than_80_columns(make_result, make_row, name):
    text = render(make_result([make_row("smollm2", "bf16"), make_row(name, "hqq " * 40)],
                              exact=[Interval(0.00012345, 0.00011111, 0.00022222)] * 2))
    assert max(map(columns, text.splitlines())) <= 80
    assert "\x1b" not in text and "\t" not in text


def test_huge_and_missing_numbers_still_fit(make_result, make_row):
    wild = make_row("wild", ppl=123456.7, kl=0.00012345, top1=0.00012345, prefill=123456, decode=98765,
                    mb=123456, bits=15.97)
    broken = make_row("broken", ppl=math.inf, kl=1234567.8, prefill=None)
    broken.peak_bytes = None
    text = render(make_result([wild, broken]))
    assert max(map(columns, text.splitlines())) <= 80
    for piece in ("123457", "0.000123", "0.000115–", "0.000133", "∞", "1.235e6", "–"):
        assert piece in text


def test_protocol_and_noise_floor_are_printed(make_result):
    result = make_result(exact=[Interval(0.0011, 0.001, 0.0012), Interval(0.0031, 0.003, 0.0032)])
    text = render(result)
    assert result.protocol.fingerprint in text and "noise floor" in text
    first, second, third, *_ = text[text.index("in float32"):].splitlines()[1:]
    assert first.split() == ["smollm2", "0.00110", "0.00100–0.00120"]
    assert second.split() == ["int8", "0.00310", "0.00300–0.00320", "+0.00200"]
    assert third.startswith("The first of these"), "only what was compared stands there"
    assert "noise floor" not in render(make_result())


def test_the_headline_and_the_command_come_first(make_result):
    words = ["quantkit", "eval", "smollm2", *(f"out/a model {i}" for i in range(8)), "--kv", "window(512)"]
    lines = render(make_result(command=shlex.join(words))).splitlines()
    assert lines[0].startswith("Take int8: 1.65 times smaller, 1.50 times as fast, ")
    end = lines.index("")
    command = "\n".join(lines[next(n for n, line in enumerate(lines) if line.startswith("Reproduce")):end])
    assert command.startswith("Reproduce: ") and max(map(len, lines)) <= 80
    typed = subprocess.run(["sh", "-c", "printf '%s\\n' " + command.removeprefix("Reproduce: ")],
                           capture_output=True, text=True, check=True).stdout
    assert typed.splitlines() == words, "a shell takes its lines as one"


@pytest.mark.parametrize(("count", "below"), [(1, 0), (6, 3)])
def test_metrics_of_plugins_stand_beside_the_others_or_below(make_result, count, below):
    from quantkit.evaluation.metric_table import MetricInfo

    result = make_result()
    for number in range(count):
        result.metrics[f"mine{number}"] = MetricInfo(f"mine {number}", "%", "lower", "run", "quantkit-mine")
        for row, value in zip(result.rows, (0.125, 0.25, 0.5, 1)):
            row.metrics[f"mine{number}"] = Interval(value, value, value)
    text = render(result)
    assert max(map(columns, text.splitlines())) <= 80
    assert text.count("── mine") == below
    assert all(f"mine {number}" in text for number in range(count)) and text.count("12.5%") == count
    if below:
        block = text[text.index("── mine 5"):].splitlines()
        assert block[2].split() == ["int8", "25.0%", "+12.5"]



def test_tails_texts_and_verdicts_stand_below(rich):
    text = render(rich)
    assert max(map(columns, text.splitlines())) <= 80
    tails = text[text.index("── KL by token"):].splitlines()
    assert tails[1].split() == ["variant", "KL", "median", "KL", "99%", "KL", "99.9%", "flips"]
    assert tails[5].split() == ["int8", "kv", "none", "0.000620", "0.0434", "0.124", "3.06%"]
    by_text = text[text.index("── KL, nats, by text"):].splitlines()
    assert by_text[1].split() == ["variant", "prose", "code", "dialogue", "german"]
    task = text[text.index("── piqa · acc"):].splitlines()
    assert [line.split()[-1] for line in (task[2], task[15])] == ["=", "worse"]
    assert "indistinguishable within ε" in text


def test_many_texts_with_long_names_still_fit(rich):
    for row in rich.rows:
        row.texts = {f"模型 {number} {'long ' * 4}": row.metrics for number in range(9)}
    text = render(rich)
    assert max(map(columns, text.splitlines())) <= 80 and all(f"模型 {number}" in text for number in range(9))
