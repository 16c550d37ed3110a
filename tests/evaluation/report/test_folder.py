"""A folder with the report in every form, each file whole or not there."""

import json
import os
import re
from pathlib import Path

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.base import Reporter
from quantkit.evaluation.report.folder import check_writable, reporters, write_report
from quantkit.evaluation.results_file import render as render_json
from quantkit.support.errors import PluginError, QuantkitError, UsageError

FILES = ["frontier.png", "frontier.svg", "junit.xml", "model-card.md", "report.html", "report.md",
         "results.json"]


def test_all_files(make_result, tmp_path):
    written = write_report(make_result(), tmp_path / "deep" / "report")
    assert sorted(p.name for p in (tmp_path / "deep" / "report").iterdir()) == FILES
    assert sorted(p.name for p in written) == FILES
    found = json.loads((tmp_path / "deep" / "report" / "results.json").read_text())
    assert [row["model"] for row in found["results"]] == ["smollm2", "demo/int8", "demo/int4", "demo/nf4"]


def test_a_failed_write_leaves_the_older_file_and_no_scraps(make_result, make_row, tmp_path, monkeypatch):
    write_report(make_result(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    real = Path.write_bytes

    def full(self, data):
        real(self, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(QuantkitError) as caught:
        write_report(make_result([make_row("newer")]), tmp_path)
    assert "No space left" in caught.value.why and caught.value.next
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be(make_result, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(QuantkitError) as caught:
        write_report(make_result(), tmp_path / "file" / "report")
    error = caught.value
    assert str(tmp_path) in error.what and error.why and "--out" in error.next


@pytest.fixture
def registered(monkeypatch):
    """``registered(name, reporter)``: as a plugin's, beside the built-ins."""
    from quantkit.plugins import manager as plugins

    manager = plugins.PluginManager(only=())
    monkeypatch.setattr(plugins, "current", lambda: manager)

    def register(name, reporter, owner="quantkit-mine"):
        manager.registries["reporters"].register(name, reporter, owner=owner)

    return register


def written(result, folder, names=None):
    return sorted(path.name for path in write_report(result, folder, names))


def test_a_plugin_s_file_is_written_too(make_result, tmp_path, registered):
    registered("mine", Reporter("mine", "mine.bin", lambda result: b"\x00\xff"))
    registered("quiet", Reporter("quiet", "quiet.txt", lambda result: "quiet", in_folder=False))
    assert written(make_result(), tmp_path) == sorted(["mine.bin", *FILES])
    assert (tmp_path / "mine.bin").read_bytes() == b"\x00\xff"


def test_exactly_the_named_ones(make_result, tmp_path, registered):
    registered("quiet", Reporter("quiet", "quiet.txt", lambda result: "ü", in_folder=False))
    assert written(make_result(), tmp_path, ["quiet", "json", "quiet"]) == ["quiet.txt", "results.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quiet.txt", "results.json"]
    assert (tmp_path / "quiet.txt").read_bytes() == "ü".encode()
    with pytest.raises(UsageError, match="jsn") as caught:
        write_report(make_result(), tmp_path, ["jsn"])
    assert "did you mean 'json'" in caught.value.why


def fails(result):
    raise KeyError("decode")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("render", "reason"), [
    (fails, "KeyError"), (lambda result: None, "returns a NoneType"), (lambda result: 1 / 0, "ZeroDivision")])
def test_a_reporter_that_fails_costs_its_own_file(make_result, tmp_path, registered, render, reason):
    registered("mine", Reporter("mine", "mine.txt", render))
    with pytest.warns(UserWarning, match=f"'mine' of quantkit-mine failed.*mine.txt.*{reason}") as caught:
        assert written(make_result(), tmp_path) == FILES
    assert len(caught) == 1
    with pytest.raises(PluginError, match="'mine' of quantkit-mine failed") as raised:
        write_report(make_result(), tmp_path / "named", ["mine", "json"])
    names = [path.name for path in (tmp_path / "named").iterdir()]
    assert names == ["results.json"], "the others are written"
    assert reason in raised.value.why and "quantkit-mine" in raised.value.next


def test_a_built_in_that_fails_raises(make_result, tmp_path, monkeypatch):
    from quantkit.plugins.manager import registry

    table = registry("reporters")
    monkeypatch.setitem(table._loaded, "svg", Reporter("svg", "frontier.svg", fails))
    with pytest.raises(KeyError):
        write_report(make_result(), tmp_path)


def test_a_reporter_that_changes_the_result_changes_only_its_copy(make_result, tmp_path, registered):
    def spoils(result):
        result.rows.clear()
        return "spoilt"

    registered("a", Reporter("a", "a.txt", spoils))
    registered("b", Reporter("b", "b.txt", lambda result: str(len(result.rows))))
    result = make_result()
    write_report(result, tmp_path)
    assert (tmp_path / "b.txt").read_text() == "4" and len(result.rows) == 4


def test_a_file_that_has_no_plain_name_is_left_out(make_result, tmp_path, registered):
    files = ("../up.txt", "/tmp/x", "a/b", "a\\b", "", ".", "..", "a\nb", ".hidden", "x.new", "c:x",
             "n" * 200)
    for number, file in enumerate(files):
        registered(f"mine{number}", Reporter(f"mine{number}", file, lambda result: "text"))
    with pytest.warns(UserWarning) as caught:
        assert written(make_result(), tmp_path / "in") == FILES
    for number in range(len(files)):
        pattern = f"'mine{number}' of quantkit-mine was left out: .*plain file name"
        assert sum(bool(re.search(pattern, str(warning.message), re.DOTALL)) for warning in caught) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    for number in range(len(files)):
        with pytest.raises(PluginError, match="can't be used"):
            write_report(make_result(), tmp_path / "in", [f"mine{number}"])


def test_of_equal_files_the_built_in_stays(make_result, tmp_path, registered):
    registered("mine", Reporter("mine", "Report.MD", lambda result: "mine"))
    with pytest.warns(UserWarning, match="'mine' of quantkit-mine .* also that of 'markdown' of quantkit"):
        assert written(make_result(), tmp_path) == FILES
    assert written(make_result(), tmp_path / "alone", ["mine"]) == ["Report.MD"], "alone it is no matter"
    with pytest.raises(UsageError, match="both write"):
        write_report(make_result(), tmp_path, ["mine", "markdown"])


def test_of_two_plugins_equal_files_neither_is_written(make_result, tmp_path, registered):
    registered("one", Reporter("one", "x.txt", lambda result: "one"), owner="quantkit-one")
    registered("two", Reporter("two", "x.txt", lambda result: "two"), owner="quantkit-two")
    with pytest.warns(UserWarning) as caught:
        assert "x.txt" not in written(make_result(), tmp_path)
    assert len(caught) == 2
    assert all("quantkit-one" in str(warning.message) and "quantkit-two" in str(warning.message)
               for warning in caught)


def test_what_is_no_reporter_is_left_out(registered):
    registered("mine", lambda result: "text")
    with pytest.warns(UserWarning, match="mine"):
        names = [registered.name for registered in reporters()]
    assert names == ["json", "markdown", "html", "junit", "model_card", "svg", "png"]
    with pytest.raises(PluginError):
        reporters(["mine"])


def test_a_name_that_is_no_utf_8_still_has_a_report(make_result, make_row, tmp_path):
    write_report(make_result([make_row("caf\udce9")]), tmp_path)
    assert "caf?" in (tmp_path / "report.md").read_text()


def test_a_folder_is_tried_without_a_trace(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    check_writable(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and not list((tmp_path / "mine").iterdir())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "report"):
        with pytest.raises(QuantkitError, match="can't be written") as caught:
            check_writable(folder)
        assert caught.value.why and "--out" in caught.value.next
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(QuantkitError, match="can't be written"):
            check_writable(tmp_path / "locked")


KEYS = ("model", "method", "bits_per_weight", "file_bytes", "peak_bytes", "perplexity", "kl_mean", "top1",
        "prefill_tok_s", "decode_tok_s")


def test_keys_and_values(make_result):
    found = json.loads(render_json(make_result(exact=[Interval(0.0011, 0.001, 0.0012)])))
    assert set(found) == {"results", "protocol", "noise_floor_kl", "metrics", "question", "command", "suite",
                          "floors", "roofline", "sensitivity", "diff", "other_diffs", "version",
                          "plotted", "gate"}
    described = found["metrics"]
    assert list(described)[:3] == ["kl_mean", "top1", "decode_tok_s"]
    assert all(set(row["intervals"]) <= set(described) for row in found["results"])
    assert described["top1"] == {"title": "top-1", "unit": "%", "direction": "higher", "per": "token",
                                 "distribution": "quantkit"}
    for row in found["results"]:
        assert tuple(row)[:len(KEYS)] == KEYS
        assert row["intervals"]["kl_mean"][0] <= row["kl_mean"] <= row["intervals"]["kl_mean"][1]
    assert found["protocol"]["fingerprint"] and found["protocol"]["window"] == 512
    assert found["noise_floor_kl"] == {"value": 0.0011, "interval": [0.001, 0.0012]}
