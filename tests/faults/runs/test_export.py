"""An export is a run like any other: killed at a write point and begun again, it ends with the same bytes."""

from __future__ import annotations

import pytest

from quantkit.checkpoint import durable
from quantkit.export.layouts import export
from quantkit.quantization.run import quantize
from quantkit.support.errors import CheckpointError


@pytest.fixture(scope="package")
def original(tiny, tmp_path_factory):
    """A checkpoint to be packed anew."""
    return quantize(str(tiny), "int4-rtn", tmp_path_factory.mktemp("original") / "int4").out


@pytest.fixture(params=["gptq", "awq"])
def run(request, original, run_by):
    return run_by(f"export to {request.param}", lambda out: export(str(original), request.param, out))


@pytest.fixture
def killed(tmp_path, at_step, in_child, kill, monkeypatch):
    def one(run, number):
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        at_step(number, kill)
        assert in_child(lambda: run(out)) == -9, run.steps[number]
        monkeypatch.setattr(durable, "step", lambda what: None)
        return out

    return one


def test_killed_at_some_points(run, killed):
    for number in run.points(6):
        run.again(killed(run, number))


@pytest.mark.slow
def test_killed_at_every_point(run, killed, figures):
    assert run.reference
    for number in range(len(run.steps)):
        run.again(killed(run, number))
    figures.setdefault("exports killed at every write point", {})[run.folder.name] = len(run.steps)


def test_an_export_to_another_layout_does_not_take_over(original, run_by, killed):
    run = run_by("export to gptq", lambda out: export(str(original), "gptq", out))
    assert run.reference
    out = killed(run, run.steps.index("create part-layer-1.safetensors"))
    with pytest.raises(CheckpointError, match="another run") as caught:
        export(str(original), "awq", out)
    assert "--to: gptq → awq" in caught.value.why and "rm -r" in caught.value.next
    run.again(out)
