"""A folder with three files, each whole or not there."""

import json

import pytest

from quantkit.errors import QuantkitError
from quantkit.report.folder import write_report


def test_three_files(make_result, tmp_path):
    written = write_report(make_result(), tmp_path / "deep" / "report")
    assert sorted(p.name for p in (tmp_path / "deep" / "report").iterdir()) == [
        "plot.svg", "report.md", "results.json"]
    assert sorted(p.name for p in written) == ["plot.svg", "report.md", "results.json"]
    found = json.loads((tmp_path / "deep" / "report" / "results.json").read_text())
    assert [row["model"] for row in found["results"]] == ["smollm2", "demo/int8", "demo/int4", "demo/nf4"]


def test_older_ones_are_replaced(make_result, make_row, tmp_path):
    write_report(make_result(), tmp_path)
    write_report(make_result([make_row("newer")]), tmp_path)
    assert "newer" in (tmp_path / "report.md").read_text()
    assert "smollm2" not in (tmp_path / "report.md").read_text()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failed_write_leaves_the_older_file_and_no_scraps(make_result, make_row, tmp_path, monkeypatch):
    from pathlib import Path

    write_report(make_result(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    real = Path.write_text

    def full(self, data, *args, **kwargs):
        real(self, data[:10], *args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
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
