"""Progress off a terminal: a line every tenth, with what is left; silence when asked. No test waits."""

import random
import re
from itertools import pairwise

import pytest

from quantkit.api.progress import (
    MAX_GROWTH,
    MIN_SECONDS,
    CompileNotice,
    ProgressLine,
    TimeLeft,
    human_seconds,
)
from quantkit.support.progress import Phases, ProgressEvent, between


class Clock:
    """Seconds that pass when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_line_every_tenth(capsys):
    clock = Clock()
    with ProgressLine("work", clock=clock) as progress:
        for done in range(101):
            progress(ProgressEvent(done, 100, "x"))
            clock.now += 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 10
    assert lines[0] == "work: 10 of 100, about 2 min left"
    assert lines[8] == "work: 90 of 100, about 10 s left"
    assert lines[-1] == "work: 100 of 100"


def test_shares_are_percent(capsys):
    with ProgressLine("work") as progress:
        progress(ProgressEvent(335, 1000, "x", unit="%"))
    assert capsys.readouterr().err == "work: 33%\n"


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


def test_a_bar_names_the_phase(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine("work") as progress:
        Phases(progress, ["reading", "solving"])("solving")(ProgressEvent(1, 4, "layer 0"))
    err = capsys.readouterr().err
    assert "Phase 2 of 2, solving" in err and "1/4" in err


def within(progress, clock, layers, shares, seconds):
    """Events of layers that take ``seconds`` each, with steps at these shares of them."""
    named = Phases(progress, ["weighing", "quantizing"])("quantizing")
    for layer in range(layers):
        named(ProgressEvent(layer, layers, f"layer {layer}"))
        before = 0.0
        for share in shares:
            clock.now += (share - before) * seconds
            before = share
            named(ProgressEvent(layer, layers, f"layer {layer}", share=share,
                                detail=f"layer {layer}: {share}"))
        clock.now += (1 - before) * seconds
    named(ProgressEvent(layers, layers, ""))


def test_what_is_left_is_known_before_the_first_layer_ends(capsys):
    clock = Clock()
    with ProgressLine("work", clock=clock) as progress:
        within(progress, clock, 28, (0.1, 0.5, 0.9), 70.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "work: phase 2 of 2, quantizing"
    assert lines[1] == "work: phase 2 of 2, quantizing: layer 0: 0.5, about 32 min left in this phase"
    assert lines[2].startswith("work: phase 2 of 2, quantizing: layer 1: 0.1")
    assert "work: phase 2 of 2, quantizing: 14 of 28, about 16 min left in this phase" in lines


def test_short_layers_get_no_lines_of_their_own(capsys):
    clock = Clock()
    with ProgressLine("work", clock=clock) as progress:
        within(progress, clock, 20, (0.1, 0.5, 0.9), 2.0)
    assert "layer" not in capsys.readouterr().err


def test_a_bar_says_what_is_done_within_a_layer_in_80_columns(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    detail = "layer 3 of 28: solving self_attn.q_proj, 1 of 7 Linears done"
    clock = Clock()
    with ProgressLine("work", clock=clock) as progress:
        named = Phases(progress, ["weighing", "measuring", "quantizing layers"])("quantizing layers")
        named(ProgressEvent(2, 28, "layer 2"))
        clock.now += 60
        named(ProgressEvent(2, 28, "layer 2", share=0.5, detail=detail))
    err = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert f"  {detail}" in err and "about 51 min left" in err
    assert max(map(len, err.replace("\r", "\n").split("\n"))) <= 80


# -- phases


def run(phases, clock=None, title="work"):
    """Events of phases whose units take these numbers of seconds."""
    clock = clock or Clock()
    with ProgressLine(title, clock=clock) as progress:
        named = Phases(progress, list(phases))
        for name, seconds in phases.items():
            for done in range(len(seconds) + 1):
                named(name)(ProgressEvent(done, len(seconds), "unit"))
                clock.now += seconds[done] if done < len(seconds) else 0


def test_a_phase_is_named_counted_and_timed_by_itself(capsys):
    run({"weighing": [0.02] * 60, "measuring": [8.0] * 30})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "work: phase 1 of 2, weighing"
    assert lines[10] == "work: phase 1 of 2, weighing: 60 of 60"
    assert not any("left" in line for line in lines[:12]), "seconds are too few to judge by"
    assert lines[11] == "work: phase 2 of 2, measuring"
    assert lines[12] == "work: phase 2 of 2, measuring: 3 of 30, about 4 min left in this phase"
    assert lines[-2] == "work: phase 2 of 2, measuring: 27 of 30, about 25 s left in this phase"


def test_a_phase_of_a_longer_run_is_counted_in_that():
    told = []
    Phases(between(told.append, 3, 6), ["a", "b"])("b")(ProgressEvent(0, 1, "x"))
    between(told.append, 3, 6)(ProgressEvent(0, 1, "x"))
    assert (told[0].phase.number, told[0].phase.total, told[0].phase.name) == (5, 6, "b")
    assert told[1].phase is None
    with pytest.raises(ValueError):
        Phases(told.append, ["a"])("none")


@pytest.mark.parametrize("slow", [0.1, 5.0, 40.0])
def test_the_lines_of_a_phase_that_slows_down_do_not_jump(capsys, slow):
    run({"solving": [1.0] * 50 + [slow] * 50})
    left = [line.partition("about ")[2] for line in capsys.readouterr().err.splitlines() if "about" in line]
    seconds = [float(text.split()[0]) * {"s": 1, "min": 60}[text.split()[1]] for text in left]
    assert len(seconds) == 9
    assert all(later <= 1.1 * MAX_GROWTH * earlier for earlier, later in pairwise(seconds))


# -- time left


def estimates(seconds, kept=0):
    """What is shown before each unit and at the end, and the truth."""
    clock, shown = Clock(), []
    left = TimeLeft(clock)
    left.begin(0)
    for done, taken in enumerate([*seconds, 0]):
        left.update(done, len(seconds), kept=done < kept)
        shown.append((left.show(), sum(seconds[done:])))
        clock.now += taken
    return shown


def unevenly():
    chance = random.Random(5)
    yield "fast, then slow", [0.1] * 60 + [8.0] * 30
    yield "slow, then fast", [8.0] * 30 + [0.1] * 60
    yield "one that hangs", [2.0] * 20 + [200.0] + [2.0] * 20
    yield "slower and slower", [1.05 ** i for i in range(100)]
    for number in range(20):
        yield f"random {number}", [chance.expovariate(0.2) for _ in range(chance.randint(4, 80))]


@pytest.mark.parametrize("seconds", [pytest.param(seconds, id=name) for name, seconds in unevenly()])
def test_the_time_left_never_jumps_up(seconds):
    shown = [value for value, _ in estimates(seconds) if value is not None]
    assert all(later <= MAX_GROWTH * earlier for earlier, later in pairwise(shown))
    assert MAX_GROWTH <= 1.5


@pytest.mark.parametrize("seconds", [pytest.param(seconds, id=name) for name, seconds in unevenly()])
def test_nothing_is_shown_before_it_rests_on_enough(seconds):
    for done, (value, _) in enumerate(estimates(seconds)):
        if sum(seconds[:done]) < MIN_SECONDS - 0.01 or done < min(3, len(seconds) // 2):
            assert value is None


def test_an_even_pace_is_told_exactly_and_a_noisy_one_nearly():
    for value, truth in estimates([3.0] * 40)[3:-1]:
        assert value == pytest.approx(truth)
    chance = random.Random(1)
    for value, truth in estimates([chance.uniform(2, 4) for _ in range(200)])[10:150]:
        assert value == pytest.approx(truth, rel=0.35)


def test_a_change_of_pace_is_followed():
    value, truth = estimates([0.5] * 40 + [4.0] * 60)[80]
    assert value == pytest.approx(truth, rel=0.2)


def test_units_that_were_there_already_do_not_count():
    """20 of 30 layers, of which a resumed run only reads the results."""
    shown = estimates([0.3] * 20 + [8.0] * 10, kept=20)
    assert all(value is None for value, _ in shown[:23])
    assert all(value == pytest.approx(truth) for value, truth in shown[23:-1])


def test_the_end_has_nothing_left():
    assert estimates([3.0] * 10)[-1] == (None, 0)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.2, "1 s"), (8.4, "9 s"), (12, "10 s"), (41, "40 s"), (89, "90 s"), (100, "2 min"), (241, "4 min"),
    (5300, "88 min"), (7800, "2 h 10 min"), (7000, "2 h"), (36_000, "10 h")])
def test_an_estimate_is_told_as_exactly_as_it_is(seconds, text):
    assert human_seconds(seconds) == text


def test_a_line_of_a_run_that_takes_hours(capsys):
    run({"solving": [600.0] * 100})
    line = capsys.readouterr().err.splitlines()[1]
    assert re.fullmatch(r"work: phase 1 of 1, solving: 10 of 100, about 15 h left", line)


def test_what_takes_a_moment_is_not_told(capsys):
    clock = Clock()
    with ProgressLine("loading", clock=clock, after=2.0) as progress:
        for done in range(5):
            progress(ProgressEvent(done, 4, "weights", unit="MiB"))
            clock.now += 0.4
    assert capsys.readouterr().err == ""


def test_what_takes_longer_is_told_from_then_on(capsys):
    clock = Clock()
    with ProgressLine("loading", clock=clock, after=2.0) as progress:
        for done in range(0, 4097, 64):
            progress(ProgressEvent(done, 4096, "weights", unit="MiB"))
            clock.now += 0.5
        # the next model has a moment of its own
        for done in (0, 4096):
            progress(ProgressEvent(done, 4096, "weights", unit="MiB"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading: 448 of 4,096 MiB" and lines[-1] == "loading: 4,096 of 4,096 MiB"
    assert lines[1].startswith("loading: 832 of 4,096 MiB, about ") and len(lines) == 10


def test_a_terminal_has_one_bar_at_a_time(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with ProgressLine("verifying") as first, ProgressLine("loading") as second:
        first(ProgressEvent(1, 2, "a"))
        assert first._bar.live.is_started
        second(ProgressEvent(1, 2, "b", unit="MiB"))
        assert second._bar.live.is_started and not first._bar.live.is_started
    assert not second._bar.live.is_started and ProgressLine._drawn is None


@pytest.mark.parametrize("kept", [True, False])
def test_compiled_kernels_are_said_to_stay_only_where_they_can(tmp_path, monkeypatch, capsys, kept):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache" if kept else file))
    CompileNotice()(ProgressEvent(0, 9, "kernels"))
    said = " ".join(capsys.readouterr().err.split())
    assert ("the next time they are there" in said) == kept
    assert ("can't be written: QUANTKIT_CACHE=DIR names another" in said) != kept
