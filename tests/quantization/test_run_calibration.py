"""Runs that calibrate on any kind of data: what the manifest says, what a stop keeps, what is strict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.reader import Checkpoint
from quantkit.quantization import solve
from quantkit.quantization.calibration import data
from quantkit.quantization.methods import gptq
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import CalibrationSpec, load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.memory.machine import RUNTIME_BYTES
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError, Stopped
from quantkit.testing import tiny_model
from tests.helpers.folders import contents

OWN = CalibrationSpec(text="self", windows=3, window=48)
SMALL = CalibrationSpec(windows=4, window=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "model"))


def manifest(folder: Path) -> Manifest:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.manifest


# -- what the manifest says


def test_chats_are_in_the_manifest_and_on_the_card_without_a_folder_of_this_machine(model, tmp_path):
    data = tmp_path / "private" / "chats.jsonl"
    data.parent.mkdir()
    chats = [{"prompt": f"What is {i} and {i}?", "response": f"It is {2 * i}."} for i in range(40)]
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    exam = tmp_path / "private" / "exam.txt"
    exam.write_text("Something else.")
    spec = CalibrationSpec(text=(str(data), "builtin"), windows=4, window=48, avoid=(str(exam),))
    out = quantize(model, "int4", tmp_path / "out", calibration=spec).out
    made = manifest(out)
    facts = made.calibration
    assert facts.text == "chats.jsonl, builtin" and facts.packing == "documents"
    assert [file.name for file in facts.files] == ["chats.jsonl"]
    assert facts.coverage.documents > 60 and facts.coverage.chats == 40 and facts.coverage.used == 192
    assert [one.text for one in facts.coverage.overlaps] == ["eval's built-in text", "exam.txt"]
    assert made.recipe["calibration"]["text"] == ["chats.jsonl", "builtin"]
    assert made.recipe["calibration"]["avoid"] == ["exam.txt"]
    for name in ("quantkit.json", "README.md"):
        assert "private" not in (out / name).read_text()
    card = (out / "README.md").read_text()
    assert all(line in card for line in facts.coverage.lines())
    assert verify(out).ok


def test_every_calibrated_layer_says_how_many_tokens_reached_it(model, tmp_path):
    rows = quantize(model, "int4", tmp_path / "out", calibration=SMALL).rows
    assert {row.tokens for row in rows if "layers" in row.name} == {128}
    assert [row.tokens for row in rows if "layers" not in row.name] == [None], "rounded without any text"
    assert {row.tokens for row in quantize(model, "int8", tmp_path / "plain").rows} == {None}


def test_a_manifest_of_before_these_fields_is_read(model, tmp_path):
    made = manifest(quantize(model, "int4", tmp_path / "out", calibration=SMALL).out)
    plain = made.model_dump(mode="json") | {"digest": ""}
    for key in ("packing", "files", "coverage"):
        del plain["calibration"][key]
    for row in plain["layers"]:
        del row["tokens"]
    from quantkit.checkpoint.manifest import _canonical, hashlib

    raw = _canonical(plain | {"digest": hashlib.sha256(_canonical(plain)).hexdigest()})
    old = Manifest.from_bytes(raw)
    assert old.calibration.coverage is None and old.layers[0].tokens is None


# -- text that the model writes


def test_text_of_the_models_own(model, tmp_path):
    heard = []
    out = quantize(model, "int4", tmp_path / "out", calibration=OWN, progress=heard.append).out
    facts = manifest(out).calibration
    assert (facts.text, facts.tokens, facts.coverage.used) == ("self", 144, 144) and facts.files == ()
    assert [(event.done, event.total) for event in heard if event.label.startswith("writing")] == [
        (3 * i, 144) for i in range(1, 49)]
    again = quantize(model, "int4", tmp_path / "again", calibration=OWN).out
    assert contents(again) == contents(out)
    other = quantize(model, "int4", tmp_path / "other", calibration=OWN.model_copy(update={"seed": 1})).out
    assert manifest(other).calibration.sha256 != facts.sha256


def test_a_template_that_fails_is_noted_and_strict_refuses(tmp_path):
    folder = tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such thing') }}")
    result = quantize(str(folder), "int4", tmp_path / "out", calibration=OWN)
    note = manifest(result.out).calibration.coverage.fallback
    assert "plain text" in note and "no such thing" in note
    assert result.fallbacks == (f"calibration: {note}",)
    assert f"- calibration: {note}" in (result.out / "README.md").read_text()
    with pytest.raises(QuantkitError, match="plain text") as caught:
        quantize(str(folder), "int4", tmp_path / "strict", calibration=OWN, strict=True)
    assert "--strict" in caught.value.why and not list(tmp_path.glob("strict*"))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_of_nan_is_named_where_the_model_writes(tmp_path, name):
    folder = tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantkitError) as caught:
        quantize(str(folder), "int4", tmp_path / "out", calibration=OWN)
    assert caught.value.what.startswith(f"tensor {name!r} of ") and "not finite" in caught.value.what


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", ["layer 0", "layer 1", "embeddings and head", "assembling and rereading"])
def test_a_stopped_run_goes_on_with_the_text_that_it_wrote(model, tmp_path, monkeypatch, label, stop_at):
    whole = contents(quantize(model, "int4", tmp_path / "whole", calibration=OWN).out)
    with pytest.raises(Stopped):
        quantize(model, "int4", tmp_path / "out", calibration=OWN, progress=stop_at(label))
    monkeypatch.setattr(data, "write_windows", lambda *a: pytest.fail("it was written again"))
    assert contents(quantize(model, "int4", tmp_path / "out", calibration=OWN).out) == whole


def test_the_predicted_peak_holds_the_whole_model(model):
    recipe, source = load_recipe("int4"), open_source(model)
    plain, own = (make_plan(recipe.model_copy(update={"calibration": CalibrationSpec(
        text=text, windows=2, window=8, importance="equal")}), source).peak_bytes
        for text in ("builtin", "self"))
    values = sum(row.shape[0] * row.shape[1] for row in make_plan(recipe, source).rows)
    assert own >= plain and own > 4 * values + RUNTIME_BYTES


@pytest.mark.parametrize("text", [(), ("",), "", ("self", "builtin")])
def test_texts_that_are_none(text):
    with pytest.raises(ValueError, match="text"):
        CalibrationSpec(text=text)


# -- strict


def broken(model: str, to: Path, change) -> str:
    to.mkdir()
    for path in Path(model).iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def no_input(tensors) -> None:
    tensors["model.layers.1.post_attention_layernorm.weight"].zero_()


def no_gradient(tensors) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()


def raised(model, tmp_path, monkeypatch):
    """The first factorization of the second layer fails at the least damping."""
    factorize, calls = torch.linalg.cholesky_ex, []

    def fails(matrix, upper):
        calls.append(1)
        return factorize(matrix, upper=upper)[0], torch.tensor(int(len(calls) == 8))

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)


def hopeless(model, tmp_path, monkeypatch):
    factorize, calls = torch.linalg.cholesky_ex, []

    def fails(matrix, upper):
        calls.append(1)
        return factorize(matrix, upper=upper)[0], torch.tensor(int(8 <= len(calls) < 12))

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)


def no_better(model, tmp_path, monkeypatch):
    below, calls = gptq.rows_below, []

    def worse(error, other, hessian):
        calls.append(1)
        return below(error, other, hessian) & (len(calls) != 8)

    monkeypatch.setattr(gptq, "rows_below", worse)


def few_tokens(model, tmp_path, monkeypatch):
    monkeypatch.setattr(solve, "EXPERT", "layers.1.mlp.down_proj")
    monkeypatch.setattr(solve, "FEW_TOKENS", 129)


FALLBACKS = {"raised": (raised, "damping raised from 0.05 to 0.5"),
             "hopeless": (hopeless, "in place of gptq: the Hessian is not positive definite at damping"),
             "no better": (no_better, "its loss on the calibration text was no lower"),
             "few tokens": (few_tokens, "only 128 calibration tokens reached this expert"),
             "no input": (no_input, "no calibration input reached it"),
             "no gradient": (no_gradient, "no answer of the model depends on it")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FALLBACKS)
def test_every_fallback_is_told_and_strict_makes_it_an_error_that_keeps_what_is_done(
        model, tmp_path, monkeypatch, kind):
    cause, said = FALLBACKS[kind]
    spec = SMALL.model_copy(update={"importance": "gradient" if kind == "no gradient" else "equal"})
    source = broken(model, tmp_path / "model", cause) if cause in (no_input, no_gradient) else model

    def run(out: str, strict: bool):
        with monkeypatch.context() as patched:
            if source == model:
                cause(model, tmp_path, patched)
            return quantize(source, "int4", tmp_path / out, calibration=spec, strict=strict)

    result = run("out", False)
    told = [note for note in result.fallbacks if said in note]
    assert told and all(note.startswith("model.layers.1.") for note in told)
    made = manifest(result.out)
    assert {f"{row.name}: {note}" for row in made.layers for note in row.notes} == set(result.fallbacks)
    assert "## Fallbacks taken" in (result.out / "README.md").read_text()

    with pytest.raises(QuantkitError, match=r"^model\.layers\.1\.") as caught:
        run("strict", True)
    assert said in caught.value.what and "--strict" in caught.value.why and "--strict" in caught.value.next
    assert not (tmp_path / "strict").exists()
    kept = {path.name for path in (tmp_path / "strict.partial").iterdir()}
    assert "part-layer-0.json" in kept and "part-layer-1.json" not in kept

    # without --strict the same run goes on from there
    assert run("strict", False).resumed == 2, "the embedding, and layer 0"
    assert verify(tmp_path / "strict").ok
