"""Recovery from recipe to checkpoint, on tiny models: kept or not, resumed, refused."""

from __future__ import annotations

import json

import pytest
import torch

import quantkit_recover
import quantkit_recover.recovery
from quantkit.checkpoint import durable
from quantkit.checkpoint.manifest import Manifest
from quantkit.plugins.manager import current
from quantkit.quantization.budget import choose as budget
from quantkit.quantization.budget.amount import parse_budget
from quantkit.quantization.budget.choose import choose
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import CalibrationSpec, load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import (
    CheckpointError,
    QuantkitError,
    RecipeError,
    Stopped,
    UsageError,
)
from quantkit.testing import tiny_model


@pytest.fixture(autouse=True)
def plugin():
    current.cache_clear()
    current().add(quantkit_recover, "quantkit-recover", version="0.1")
    yield
    current.cache_clear()


RECIPE = """
name: recovered
calibration: {windows: 4, window: 32}
recover: RECOVER
rules:
  - {match: lm_head, optional: true}
  - match: "*"
    method: METHOD
    spec: {SPEC}
"""
INT2 = "bits: 2, symmetric: false, granularity: {strategy: group, size: 16}"
INT3 = "bits: 3, granularity: {strategy: channel}"
TRELLIS = "kind: trellis, bits: 2, window: 10, granularity: {strategy: channel}, rotation: hadamard"
DISTILL = "{name: distill, windows: 16, options: {steps: 10, batch: 4, lr: 0.02, norm_lr: 0.01}}"
# enough text and steps that a random model of any CPU's arithmetic comes closer
LONGER = "{name: distill, windows: 64, options: {steps: 20, batch: 8, lr: 0.01, norm_lr: 0.005}}"
WORSE = "{name: distill, windows: 16, options: {steps: 3, batch: 4, lr: 1, norm_lr: 1, warmup: 0}}"


def recipe(folder, recover=DISTILL, method="rtn", spec=INT2):
    path = folder / "recovered.yaml"
    path.write_text(RECIPE.replace("RECOVER", recover).replace("METHOD", method).replace("SPEC", spec))
    return str(path)


def tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "method", "spec"), [
    ("llama", "rtn", INT2), ("qwen2", "gptq", INT2), ("gemma2", "rtn", INT3), ("mha", "gptq", TRELLIS)])
def test_the_loss_falls_and_codes_stay(tmp_path, family, method, spec):
    # rings of a trellis have 64 rows, which k and v of the other models haven't
    overrides = {"num_key_value_heads": 4} if family == "mha" else {}
    tiny = str(tiny_model(tmp_path / "tiny", family.replace("mha", "llama"), **overrides))
    result = quantize(tiny, recipe(tmp_path, LONGER, method, spec), tmp_path / "out")
    assert result.recovery.kept and result.recovery.after < 0.95 * result.recovery.before
    assert result.recovery.windows == 64 and result.recovery.held_out == 8 and not result.fallbacks
    assert verify(result.out).ok
    plain = quantize(tiny, recipe(tmp_path, recover="null", method=method, spec=spec), tmp_path / "plain")
    before, after = tensors(plain.out), tensors(result.out)
    assert before.keys() == after.keys()
    changed = {name.rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed <= {"weight_scale", "weight", "bias"} and {"weight_scale", "weight"} <= changed
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert [row.error for row in plain.rows] != [row.error for row in result.rows]
    manifest = json.loads((result.out / "quantkit.json").read_bytes())
    assert manifest["plugins"]["quantkit-recover"] == "0.1"
    assert manifest["recovery"]["after"] == result.recovery.after
    assert "recovery" not in json.loads((plain.out / "quantkit.json").read_bytes())
    assert "recover" not in load_recipe("int4").snapshot()
    assert Manifest.from_bytes((result.out / "quantkit.json").read_bytes()).recovery == result.recovery


def test_text_that_calibrates_nothing_is_no_calibration(tmp_path):
    tiny, words = str(tiny_model(tmp_path / "tiny")), tmp_path / "words.txt"
    for method, calibrated in (("rtn", False), ("gptq", True)):
        result = quantize(tiny, recipe(tmp_path, method=method), tmp_path / method)
        assert (result.calibration is not None) == calibrated
        manifest = Manifest.from_bytes((result.out / "quantkit.json").read_bytes())
        assert (manifest.calibration is not None) == calibrated
    words.write_text(" ".join(f"word{i}" for i in range(300)))
    spec = CalibrationSpec(text=str(words), windows=1000, window=32)  # of which none are needed
    assert quantize(tiny, recipe(tmp_path), tmp_path / "out", calibration=spec).recovery.windows == 16


def test_what_got_worse_is_not_kept(tmp_path):
    tiny, path = str(tiny_model(tmp_path / "tiny")), recipe(tmp_path, WORSE)
    result = quantize(tiny, path, tmp_path / "out")
    assert not result.recovery.kept and result.recovery.after > result.recovery.before
    assert result.fallbacks == (f"recover: {result.recovery.note}",)
    plain = quantize(tiny, recipe(tmp_path, recover="null"), tmp_path / "plain")
    assert all(torch.equal(tensor, tensors(plain.out)[name]) for name, tensor in tensors(result.out).items())
    recipe(tmp_path, WORSE)
    with pytest.raises(QuantkitError, match="did not lower the loss"):
        quantize(tiny, path, tmp_path / "strict", strict=True)


class Crash(BaseException):
    """A process that is killed."""


@pytest.mark.slow
def test_killed_at_any_instant_it_ends_with_the_same_bytes(tmp_path, monkeypatch):
    tiny, path = str(tiny_model(tmp_path / "tiny")), recipe(tmp_path)
    steps = []
    monkeypatch.setattr(durable, "step", steps.append)
    expected = quantize(tiny, path, tmp_path / "expected").out
    first = next(i for i, step in enumerate(steps) if "recover" in step)
    instants = range(first, len(steps))
    for instant in [*instants][::max(1, len(instants) // 10)]:
        count = iter(range(instant))

        def crash(step, count=count):
            if next(count, None) is None:
                raise Crash(step)

        monkeypatch.setattr(durable, "step", crash)
        out = tmp_path / f"out{instant}"
        with pytest.raises(Crash):
            quantize(tiny, path, out)
        monkeypatch.setattr(durable, "step", lambda step: None)
        if not out.exists():
            quantize(tiny, path, out)
        for file in expected.iterdir():
            assert file.read_bytes() == (out / file.name).read_bytes(), (instant, steps[instant], file.name)


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """``killed(source, recipe, out, words)``: kill a run before the first step that contains the words; a
    file of its folder with a bit flipped is what ``killed.damage(out, name)`` leaves."""
    def until(tiny, path, out, words):
        def crash(step):
            if words in step:
                raise Crash(step)

        monkeypatch.setattr(durable, "step", crash)
        with pytest.raises(Crash):
            quantize(tiny, path, out)
        monkeypatch.setattr(durable, "step", lambda step: None)

    def damage(out, name):
        file = out.with_name(f"{out.name}.partial") / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    until.damage = damage
    return until


AFTER_REPLACEMENT = "work-recover.unit-layer-1"
QUANTIZED_TABLE = """
name: recovered
calibration: {windows: 4, window: 32}
recover: RECOVER
rules:
  - {match: model.embed_tokens, method: gptq, spec: {SPEC}}
  - {match: "*", method: gptq, spec: {SPEC}}
"""


@pytest.mark.parametrize("unit", ["work-recover.result", "layer-0", "rest"])
def test_what_is_damaged_between_two_replacements_cannot_be_made_again(tmp_path, killed, unit):
    tiny, path, out = str(tiny_model(tmp_path / "tiny")), recipe(tmp_path), tmp_path / "my out"
    killed(tiny, path, out, AFTER_REPLACEMENT)
    killed.damage(out, f"part-{unit}.safetensors")
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        quantize(tiny, path, out)
    assert f"rm -r '{out}.partial'" in caught.value.next


def test_a_measured_embedding_that_is_damaged_later_cannot_be_made_again(tmp_path, killed):
    path, out = tmp_path / "recovered.yaml", tmp_path / "out"
    path.write_text(QUANTIZED_TABLE.replace("RECOVER", DISTILL).replace("SPEC", INT2))
    tiny = str(tiny_model(tmp_path / "tiny", tie_word_embeddings=True))
    killed(tiny, str(path), out, AFTER_REPLACEMENT)
    killed.damage(out, "part-embedding.safetensors")
    with pytest.raises(CheckpointError, match="unit 'embedding'"):
        quantize(tiny, str(path), out)


@pytest.mark.parametrize(("recover", "words"), [
    (WORSE, "earlier attempt"), (DISTILL, "work-recover.replacing")])
def test_a_layer_is_made_again_while_no_scale_is_new(tmp_path, killed, recover, words):
    tiny, path, out = str(tiny_model(tmp_path / "tiny")), recipe(tmp_path, recover), tmp_path / "out"
    expected = quantize(tiny, path, tmp_path / "expected").out
    killed(tiny, path, out, words)
    killed.damage(out, "part-layer-0.safetensors")
    quantize(tiny, path, out)
    for file in expected.iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name


def test_what_follows_from_the_config_is_not_trained(tmp_path):
    from safetensors.torch import save_file

    tiny = tiny_model(tmp_path / "tiny")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors(tiny) | {name: torch.arange(1, 9).float()}, tiny / "model.safetensors",
              metadata={"format": "pt"})
    result = quantize(str(tiny), recipe(tmp_path), tmp_path / "out")
    assert result.recovery.kept and torch.equal(tensors(result.out)[name], torch.arange(1, 9).float())


def test_stopped_in_training_it_goes_on_from_there(tmp_path):
    tiny, path = str(tiny_model(tmp_path / "tiny")), recipe(tmp_path)
    expected = quantize(tiny, path, tmp_path / "expected").out
    told = []

    def stop(event):
        if event.label == "scales and norms" and event.done == 6:
            raise KeyboardInterrupt

    def listen(event):
        if event.label == "scales and norms":
            told.append(event.done)

    with pytest.raises(Stopped):
        quantize(tiny, path, tmp_path / "out", progress=stop)
    out = quantize(tiny, path, tmp_path / "out", progress=listen).out
    assert told == [0, 4, 5, 6, 7, 8, 9], "the state of 4 steps was on disk"
    for file in expected.iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name


@pytest.mark.parametrize(("family", "recover", "spec", "error", "words"), [
    ("llama", "distil", INT2, UsageError, "did you mean 'distill'"),
    ("llama", "{name: distill, options: {stepz: 3}}", INT2, RecipeError, "steps"),
    ("llama", "{name: distill, options: {lr: 0}}", INT2, RecipeError, "greater than"),
    ("llama", "{name: distill, windows: 1}", INT2, RecipeError, "windows"),
    ("mixtral", "distill", INT2, RecipeError, "experts"),
    ("llama", "distill", "kind: fp, bits: 4, granularity: {strategy: group, size: 32}, scale_dtype: e8m0",
     RecipeError, "powers of 2"),
    ("llama", "distill", "kind: fp, bits: 8, granularity: {strategy: tile, size: 32}", RecipeError,
     "squares"),
    ("llama", "distill", "bits: 8, granularity: {strategy: channel}, activations: token", RecipeError,
     "activations")])
def test_what_is_refused(tmp_path, family, recover, spec, error, words):
    with pytest.raises(error) as caught:
        quantize(str(tiny_model(tmp_path / "tiny", family)), recipe(tmp_path, recover, spec=spec),
                 tmp_path / "out")
    assert words in f"{caught.value.what} {caught.value.why} {caught.value.next}"
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("text", ["random", "self"])
def test_text_that_cannot_be_trained_on(tmp_path, text):
    with pytest.raises(RecipeError, match="recovered by distill"):
        quantize(str(tiny_model(tmp_path / "tiny")), recipe(tmp_path), tmp_path / "out",
                 calibration=CalibrationSpec(text=text, windows=4, window=32))


def test_layers_that_a_transform_changes_are_refused(tmp_path):
    path = tmp_path / "recovered.yaml"
    path.write_text(RECIPE.replace("RECOVER", DISTILL).replace("METHOD", "rtn").replace("SPEC", INT2)
                    + "transforms: [awq]\n")
    with pytest.raises(RecipeError, match="recovered by distill") as caught:
        quantize(str(tiny_model(tmp_path / "tiny")), str(path), tmp_path / "out")
    assert "transform awq" in caught.value.why


def test_the_plan_knows_of_it(tmp_path):
    source = open_source(str(tiny_model(tmp_path / "tiny")))
    plan = make_plan(load_recipe(recipe(tmp_path)), source)
    plain = make_plan(load_recipe(recipe(tmp_path, recover="null")), source)
    assert plan.calibrated and not plan.measured and not plain.calibrated
    assert plan.peak_bytes > plain.peak_bytes and plan.needed_disk_bytes > plain.needed_disk_bytes
    assert plan.disk_bytes == plain.disk_bytes


@pytest.mark.parametrize("value", [torch.nan, 1e38])
def test_training_that_diverges_is_not_kept(tmp_path, monkeypatch, value):
    monkeypatch.setattr(quantkit_recover.recovery, "train", lambda parameters, *_: {
        name: torch.full_like(parameter.start, value) for name, parameter in parameters.items()})
    result = quantize(str(tiny_model(tmp_path / "tiny")), recipe(tmp_path), tmp_path / "out")
    assert not result.recovery.kept and result.recovery.after is None and "diverged" in result.fallbacks[0]


def test_a_quantized_embedding_and_head_stay(tmp_path):
    path = tmp_path / "recovered.yaml"
    rule = f"rules:\n  - {{match: model.embed_tokens, method: rtn, spec: {{{INT2}}}}}\n"
    path.write_text(RECIPE.replace("rules:\n  - {match: lm_head, optional: true}\n", rule).replace(
        "RECOVER", DISTILL).replace("METHOD", "rtn").replace("SPEC", INT2))
    for family in ("llama", "gemma2"):  # a head of its own, and a tied one
        tiny = tiny_model(tmp_path / family, family)
        result = quantize(str(tiny), str(path), tmp_path / f"{family}-out")
        assert result.recovery.kept and verify(result.out).ok


def test_a_run_that_an_earlier_version_began_goes_on(tmp_path, killed):
    """Its identity has no key for a recovery."""
    tiny, path, out = str(tiny_model(tmp_path / "tiny")), recipe(tmp_path, "null"), tmp_path / "out"
    killed(tiny, path, out, "layer-1")
    state = json.loads((tmp_path / "out.partial" / "state.json").read_bytes())
    assert "recovery" not in state["identity"] and quantize(tiny, path, out).resumed == 1


CANDIDATES = """name: recovered
calibration: {windows: 4, window: 48}
recover: {name: distill, windows: 8, options: {steps: 2, batch: 2}}
rules: [{match: lm_head, optional: true}]
candidates:
  - {method: rtn, spec: {bits: 2, granularity: {strategy: group, size: 32}}}
  - {method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}
"""


def test_what_a_budget_chose_is_recovered(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mixed.yaml").write_text(CANDIDATES)
    with_it = load_recipe(str(tmp_path / "mixed.yaml"))
    source = open_source(str(tiny_model(tmp_path / "tiny")))
    choice = choose(source, with_it, parse_budget("4bpw"))
    without = choose(source, with_it.model_copy(update={"recover": None}), parse_budget("4bpw"))
    assert choice.recipe.recover is not None and choice.chosen == without.chosen
    assert quantize(source.uri, choice.recipe, tmp_path / "out").recovery.windows == 8


@pytest.mark.parametrize(("old", "new", "words"), [
    ("steps: 2", "stepz: 1", "stepz"), ("windows: 4,", "text: random, windows: 4,", "can't be recovered"),
    ("{method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}",
     "{method: nf4, spec: {kind: nf, bits: 4, nested: true, granularity: {strategy: block, size: 64}}}",
     "can't be recovered")])
def test_it_is_refused_before_a_budget_measures_anything(tmp_path, monkeypatch, old, new, words):
    monkeypatch.setattr(budget, "sensitivities", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "mixed.yaml").write_text(CANDIDATES.replace(old, new))
    with pytest.raises(RecipeError, match=words):
        choose(open_source(str(tiny_model(tmp_path / "tiny"))), load_recipe(str(tmp_path / "mixed.yaml")),
               parse_budget("4bpw"))


def test_a_dry_run_tells_of_it_and_reads_its_text(tmp_path, command):
    tiny, path = tiny_model(tmp_path / "tiny"), recipe(tmp_path, DISTILL)
    text = " ".join(command("quantize", tiny, "-r", path, "--dry-run").stdout.decode().split())
    assert "14 training and 2 held-out windows of 32 tokens" in text and "aren't quantized" in text
    facts = json.loads(command("quantize", tiny, "-r", path, "--dry-run", "--json").stdout)
    assert facts["recovery"]["windows"] == 16 and facts["calibration"] is None


def test_the_recipe_of_the_plugin_is_recovered():
    recipe = load_recipe("trellis2-distill")
    assert recipe.rules and recipe.recover.name == "distill" and recipe.calibration.windows == 64
