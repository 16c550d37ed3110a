"""Two runs of ``quantkit eval``, compared."""

import json

SMALL = ("--windows", 2, "--window", 16, "--no-speed", "-q")


def test_what_eval_writes_can_be_compared(cli, cli_json, tiny, checkpoint, tmp_path):
    for name, more in (("a", ()), ("b", ()), ("c", ("--window", 24))):
        done = cli("eval", tiny, checkpoint, *SMALL, *more, "--out", tmp_path / name)
        assert done.exit_code == 0, done.stderr
    done = cli("compare", tmp_path / "a", tmp_path / "b" / "results.json")
    assert done.exit_code == 0, done.stderr
    assert "tiny-int8, the same checkpoint" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    data = cli_json("compare", tmp_path / "a", tmp_path / "b")
    assert [variant["name"] for variant in data["variants"]] == ["tiny", "tiny-int8"]
    assert all(change["before"] == change["after"] for change in data["variants"][1]["changes"])
    written = json.loads((tmp_path / "a" / "results.json").read_text())
    assert data["fingerprint"] == written["protocol"]["fingerprint"]
    refused = cli("compare", tmp_path / "a", tmp_path / "c")
    assert refused.exit_code == 2 and "window: 16 and 24" in refused.stderr and not refused.stdout


def test_files_that_are_no_results(cli, tmp_path):
    (tmp_path / "results.json").write_text('{"version": 1, "results": "none"}')
    for place in (tmp_path, tmp_path / "nothing", tmp_path / "results.json"):
        done = cli("compare", place, place)
        assert done.exit_code == 2 and "next: " in done.stderr and "Traceback" not in done.stderr
