"""Broken reporters, and what the kit says of each: ``check_reporter`` must catch every one of them."""

import itertools
import json
import random
import re
import time
from pathlib import Path

import pytest

from quantkit.evaluation.report.base import Reporter
from quantkit.support.errors import PluginError
from quantkit.testing import check_reporter


def names(result):
    """A sound text."""
    return "".join(f"{row.model!r} {row.metrics.get('kl_mean')}\n" for row in result.rows)


def reporter(render, file="mine.txt"):
    return Reporter("mine", file, render)


def sorts(result):
    result.rows.sort(key=lambda row: row.file_bytes)
    return names(result)


def forgets(result):
    for row in result.rows:
        row.metrics.pop("perplexity", None)
    return names(result)


def prints(result):
    print(names(result))
    return names(result)


def marked(result):
    return "<rows>" + "".join(f"<row name='{row.model}'/>" for row in result.rows) + "</rows>"


def joined(result):
    return "model,method\n" + "".join(f"{row.model},{row.method}\n" for row in result.rows)


def dumped(result):
    return json.dumps({row.model: {key: value.value for key, value in row.metrics.items()}
                       for row in result.rows})


counter = itertools.count()
BROKEN = {
    "no reporter": (names, "is no reporter"),
    "a path": (reporter(names, "reports/mine.txt"), "'reports/mine.txt' isn't a plain file name"),
    "a path upward": (reporter(names, "../mine.txt"), "isn't a plain file name"),
    "an absolute path": (reporter(names, "/tmp/mine.txt"), "isn't a plain file name"),
    "a Windows path": (reporter(names, "C:\\mine.txt"), "isn't a plain file name"),
    "no name": (reporter(names, ""), "isn't a plain file name"),
    "a hidden file": (reporter(names, ".bashrc"), "isn't a plain file name"),
    "a file object": (reporter(names, Path("mine.txt")), "isn't a plain file name"),
    "a text, not a function": (reporter("text"), "its render is a str, which can't be called"),
    "returns nothing": (reporter(lambda result: None), "render returns a NoneType, neither str nor bytes"),
    "returns lines": (reporter(lambda result: names(result).splitlines()), "render returns a list"),
    "an empty text": (reporter(lambda result: ""), "render returns nothing"),
    "needs speed": (reporter(lambda result: str([row.metrics["decode_tok_s"].value for row in result.rows])),
                    "result 'without speed': render raises KeyError"),
    "needs two models": (reporter(lambda result: str(result.rows[1])), "'one model': render raises Index"),
    "needs finite values": (reporter(lambda result: str([round(value.value) for row in result.rows
                                                         for value in row.metrics.values()])),
                            "result 'infinite values': render raises (OverflowError|ValueError)"),
    "knows its metrics": (reporter(lambda result: str([result.metrics[key].title for row in result.rows
                                                       for key in row.metrics])),
                          "result 'tasks': render raises KeyError"),
    "sorts the rows": (reporter(sorts), "render changes the result"),
    "takes metrics away": (reporter(forgets), "render changes the result"),
    "counts": (reporter(lambda result: f"{next(counter)} {names(result)}"), "two calls differ"),
    "the time": (reporter(lambda result: f"{time.perf_counter_ns()} {names(result)}"), "two calls differ"),
    "random numbers": (reporter(lambda result: f"{random.random() > 2} {names(result)}"),
                       "used the global random generator"),
    "prints": (reporter(prints), "render prints"),
    "no UTF-8": (reporter(lambda result: names(result) + "\udc80"), "UTF-8 can't write its text"),
    "markup in names": (reporter(marked, "mine.xml"), "'odd names': its .xml file can't be read again"),
    "commas in names": (reporter(joined, "mine.csv"), "its .csv file can't be read again: its rows have"),
    "NaN in JSON": (reporter(dumped, "mine.json"), "(NaN|Infinity) is no JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reporter_is_caught(name: str) -> None:
    broken, said = BROKEN[name]
    with pytest.raises(PluginError) as caught:
        check_reporter(broken)
    assert re.search(said, caught.value.what), caught.value.what
    assert caught.value.why


@pytest.mark.parametrize("sound", [reporter(names),
                                   reporter(lambda result: names(result).encode(), "mine.bin"),
                                   reporter(lambda result: json.dumps(result.to_dict()), "mine.json")])
def test_a_sound_one_passes(sound: Reporter) -> None:
    check_reporter(sound)
