"""Plans, checkpoints, evaluations and servers in Python are those of the commands."""

from __future__ import annotations

import html
import json
import sys
import urllib.error
import urllib.request

import pytest

import quantkit
from quantkit.api.evaluate import chosen_settings, settings_of
from quantkit.evaluation.report.headline import headline
from quantkit.evaluation.result import short_names
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("results") / "tiny", hidden_size=128))


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory) -> quantkit.Checkpoint:
    out = tmp_path_factory.mktemp("results") / "int8"
    return quantkit.quantize(tiny, "int8", out, progress=False)


def test_a_checkpoint_says_what_became_of_each_layer(checkpoint):
    assert {row.method for row in checkpoint.layers} == {"rtn"}
    assert str(checkpoint.path) in repr(checkpoint) and "rtn int8" in repr(checkpoint)
    page = checkpoint._repr_html_()
    kinds, each = page.split("<details>")
    assert each.count("<tr>") == len(checkpoint.layers) + 1
    assert kinds.count("<tr>") < each.count("<tr>") and "<td>model.layers.*.self_attn.q_proj</td>" in kinds
    assert all(f"<td>{row.name}</td>" in page for row in checkpoint.layers)
    assert "&lt;" not in page, "nothing is escaped twice"


def test_options_are_those_of_the_command(cli_json, tiny, tmp_path):
    texts = tmp_path / "text.txt"
    texts.write_text("the cat sat on the mat and looked at the dog. " * 200)
    ours = quantkit.quantize(tiny, "int4", tmp_path / "ours", effort="fast", calibration=str(texts),
                             windows=3, window=32, progress=False)
    theirs = cli_json("quantize", tiny, "--recipe", "int4", "--out", tmp_path / "theirs", "--effort", "fast",
                      "--calibration", texts, "--windows", 3, "--window", 32, "--quiet")
    assert [row.to_dict() for row in ours.layers] == theirs["layers"]
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (
        tmp_path / "theirs" / "model.safetensors").read_bytes()


def test_progress_is_heard(tiny, tmp_path):
    events = []
    quantkit.quantize(tiny, "int8", tmp_path / "int8", progress=events.append)
    assert events[-1].done == events[-1].total and {event.phase.name for event in events if event.phase}


@pytest.mark.parametrize(("arguments", "words"), [
    ({"recipe": None}, "neither a recipe nor a budget"), ({"out": None}, "no folder"),
    ({"recipe": "int8", "windows": 0}, "calibration"), ({"budget": "much"}, "much")])
def test_wrong_orders(tiny, tmp_path, arguments, words):
    with pytest.raises(UsageError, match=words):
        quantkit.quantize(tiny, **({"recipe": None, "out": tmp_path / "out", "progress": False} | arguments))
    assert not (tmp_path / "out").exists()


def test_a_result_is_a_table_and_a_frame(tiny, checkpoint, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 300)
    result = quantkit.evaluate([tiny, str(checkpoint.path)], text=str(text), window=32, windows=4,
                               kv=["none", "int8"], speed=False, out=tmp_path / "report", progress=False)
    assert len(result.rows) == 4 and (tmp_path / "report" / "report.html").is_file()
    page = result._repr_html_()
    assert page.count("<tr>") == 5 and "int8" in page
    frame = pytest.importorskip("pandas", reason="needs pandas") and result.to_pandas()
    assert list(frame.kl_mean)[1:] == [row.metrics["kl_mean"].value for row in result.rows[1:]]
    assert (frame.kl_mean_low.dropna() <= frame.kl_mean.dropna()).all()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(UsageError, match="pandas is not installed"):
            result.to_pandas()
    same = quantkit.compare(tmp_path / "report", result)
    assert all(change.change in (0, 1) for change in same.variants[0].changes)
    assert same._repr_html_().count("<tr>") == 1 + sum(len(variant.changes) for variant in same.variants)
    shown = str(result)
    assert shown.startswith(headline(result)[0][:40]) and max(map(len, shown.splitlines())) <= 80
    assert html.escape(headline(result)[0]) in page and repr(result) == (
        f"<quantkit.EvalResult: {', '.join(short_names(result.rows))}>")


def test_unknown_settings(tiny):
    with pytest.raises(UsageError, match="windowz"):
        quantkit.evaluate(tiny, windowz=3)


def test_a_plan_is_that_of_the_command(cli_json, tiny):
    ours = quantkit.plan(tiny, context=100, memory="700MB", recipes=["int8", "none"], progress=False)
    theirs = cli_json("plan", tiny, "--context", 100, "--memory", "700MB", "--recipe", "int8,none",
                      "--bandwidth", "10GB/s", "--flops", "1T")
    assert ours.chosen.to_dict().items() <= theirs["chosen"].items()
    assert ours.commands == theirs["next"]
    assert f"weights {ours.chosen.weights.name}, KV cache {ours.chosen.kv}" in repr(ours)
    assert 2 <= ours._repr_html_().count("<tr>") <= len(ours.combinations) + 1
    nothing = quantkit.plan(tiny, context=100, memory=1000, progress=False)
    assert "nothing fits" in nothing._repr_html_()
    with pytest.raises(UsageError, match="nothing fits"):
        _ = nothing.chosen


def test_a_server_answers_until_it_is_closed(tiny):
    with quantkit.serve(tiny, name="mine", progress=False) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions", headers={"Content-Type": "application/json"},
            data=json.dumps({"model": "mine", "prompt": "the cat", "max_tokens": 8,
                             "temperature": 0}).encode())
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["text"]
        assert text == quantkit.load(tiny, progress=False).generate("the cat", max_tokens=8).text
        with pytest.raises(UsageError, match="no API key"):
            quantkit.serve(tiny, host="0.0.0.0", progress=False)
    server.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(server.url)


def test_a_key_is_whole(tiny):
    with quantkit.serve(tiny, api_keys="secret", progress=False) as server:
        for key, status in (("secret", 200), ("s", 401), ("", 401)):
            request = urllib.request.Request(f"{server.url}/v1/models",
                                             headers={"Authorization": f"Bearer {key}"})
            try:
                assert urllib.request.urlopen(request).status == status
            except urllib.error.HTTPError as error:
                assert error.code == status
    with pytest.raises(UsageError, match="api_keys"):
        quantkit.serve(tiny, api_keys=[""], progress=False)


def test_options_override_a_suite():
    chosen = chosen_settings("standard", {"windows": 2}, speed=False)
    assert not chosen.tasks and not chosen.roofline and {text.windows for text in chosen.texts} == {None}
    assert chosen_settings("standard", {"text": "builtin"}, speed=True).texts == ()
    assert [str(spec) for spec in settings_of("none,int8")] == ["none", "int8"]


def test_what_has_no_effect_and_what_fell_back_is_said(tiny, tmp_path):
    with pytest.warns(UserWarning, match="have no effect"):
        quantkit.quantize(tiny, "int8", tmp_path / "out", windows=3, progress=False)
