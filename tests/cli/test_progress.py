"""Progress off a terminal: a line every tenth, with what is left; silence when asked."""

from quantkit.cli.progress import ProgressLine
from quantkit.progress import ProgressEvent


def test_a_line_every_tenth(capsys):
    with ProgressLine("work") as progress:
        for done in range(101):
            progress(ProgressEvent(done, 100, "x"))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 10
    assert lines[0].startswith("work: 10 of 100, about ") and lines[0].endswith(" s left")
    assert lines[-1] == "work: 100 of 100"


def test_quiet_is_quiet(capsys):
    with ProgressLine("work", quiet=True) as progress:
        progress(ProgressEvent(1, 1, "x"))
    assert capsys.readouterr() == ("", "")


def test_a_resumed_run_gives_no_eta_out_of_thin_air(capsys):
    with ProgressLine("work") as progress:
        progress(ProgressEvent(50, 100, "x"))
    assert capsys.readouterr().err == "work: 50 of 100\n"


def test_a_part_that_counts_other_things_starts_again(capsys):
    with ProgressLine("work") as progress:
        for done in (0, 40, 80):
            progress(ProgressEvent(done, 80, "windows"))
        for done in (0, 1, 2):
            progress(ProgressEvent(done, 2, "models"))
    counts = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert counts == ["work: 40 of 80", "work: 80 of 80", "work: 1 of 2", "work: 2 of 2"]


def test_nothing_to_do(capsys):
    with ProgressLine("work") as progress:
        progress(ProgressEvent(0, 0, "x"))
    assert capsys.readouterr().err == "work: 0 of 0\n"


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine("work") as progress:
        progress(ProgressEvent(0, 2, "layer 0"))
        progress(ProgressEvent(2, 2, "layer 1"))
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err and "layer 1" in err
