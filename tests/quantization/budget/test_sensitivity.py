"""Predicted divergence: against the formula in float64, and against what a damaged model's answers show."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import linear_slots, parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.ops.stored_weight import PlainWeight
from quantkit.plugins.manager import current, registry
from quantkit.quantization.budget import sensitivity as module
from quantkit.quantization.budget.sensitivity import sensitivities
from quantkit.quantization.calibration import importance
from quantkit.quantization.calibration.data import prepare
from quantkit.quantization.planning.plan import candidate_rows, make_plan
from quantkit.quantization.recipe import CalibrationSpec, Candidate, Recipe, Rule
from quantkit.quantization.transforms.base import transformed
from quantkit.sources.local import LocalSource
from quantkit.sources.open import open_source
from quantkit.support.errors import CheckpointError, SourceError, Stopped
from quantkit.testing import tiny_model
from tests.helpers.halved import HalvedPlugin

CALIBRATION = CalibrationSpec(windows=6, window=64, importance_windows=6)


def spec(bits: int, size: int | None = 32, **options) -> QuantSpec:
    granularity = Granularity(strategy="group", size=size) if size else Granularity(strategy="channel")
    return QuantSpec(bits=bits, granularity=granularity, **options)


CANDIDATES = (Candidate(method="gptq", spec=spec(2)), Candidate(method="gptq", spec=spec(3)),
              Candidate(method="rtn", spec=spec(4)), Candidate(method="gptq", spec=spec(4)),
              Candidate(method="rtn", spec=spec(8, None)), Candidate())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Measured:
    """Everything that :func:`sensitivities` takes, of a model."""

    def __init__(self, uri, candidates=CANDIDATES, calibration=CALIBRATION, rules=(), transforms=()):
        recipe = Recipe(name="r", calibration=calibration, candidates=candidates, rules=rules,
                        transforms=[{"name": one} for one in transforms])
        self.source = transformed(recipe.transforms, open_source(str(uri)))
        self.plan = make_plan(recipe.model_copy(update={"candidates": ()}), self.source)
        self.candidates, self.rows = candidates, candidate_rows(recipe, self.source)

    def __call__(self, **more):
        return sensitivities(self.source, self.plan, self.candidates, self.rows, **more)


@pytest.fixture
def measured(folder):
    return Measured(folder)


def test_every_linear_and_candidate_is_measured_and_more_bits_cost_less(measured):
    found = measured()
    assert list(found) == list(measured.rows) and len(found) == 14
    for losses in found.values():
        assert list(losses) == [0, 1, 2, 3, 4, 5] and losses[5] == 0
        assert losses[0] > losses[1] > losses[3] > losses[4] > 0
        assert losses[2] > losses[3], "GPTQ is never worse than rounding on its own Hessian"


@pytest.fixture
def halved():
    """``halved`` is registered, for this test alone."""
    current.cache_clear()
    current().add(HalvedPlugin(), "dist-halved", version="1")
    yield
    current.cache_clear()


def test_what_is_kept_is_of_the_transformed_model(folder, halved):
    """Another order of changed and plain finds the same."""
    rules = (Rule(match="lm_head", optional=True),)
    plain, changed = (Measured(folder, rules=rules, transforms=one) for one in ((), ("halved",)))
    found = changed()
    assert found != plain() and changed() == found


def test_a_folder_that_is_taken_says_how_to_measure_elsewhere(measured, tmp_path, monkeypatch):
    """What it has to do with isn't the checkpoint's folder."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))

    def second(event):
        with pytest.raises(CheckpointError, match="another quantkit is writing") as caught:
            measured()
        assert "QUANTKIT_CACHE=DIR" in caught.value.next and "--out" not in caught.value.next
        seen.append(event)

    seen: list = []
    measured(progress=second)
    assert seen


def test_tensors_are_read_alone(measured, monkeypatch):
    """A model larger than memory is walked through three times: what was read is given back each time."""
    left = [0]

    def tensor(source, name, real=LocalSource.tensor):
        left[0] += 1
        assert left[0] == 1, f"{name} is read beside another"
        return real(source, name)

    monkeypatch.setattr(LocalSource, "tensor", tensor)
    monkeypatch.setattr(LocalSource, "release", lambda source: left.__setitem__(0, 0))
    assert measured() and left[0] == 1


def test_it_is_half_the_fisher_weighted_error(measured, tmp_path, monkeypatch):
    """By hand, in float64, from all inputs and gradients of the whole model."""
    given, find = {}, module.token_gradients
    monkeypatch.setattr(module, "token_gradients", lambda *args: given.update(find(*args)) or given)
    monkeypatch.setattr("quantkit.quantization.calibration.importance.MOST", float("inf"))
    found, source = measured(), measured.source
    config = parse_config(source.config())
    weights = Weights(source.tensor, source.tensors().__contains__, torch.float32)
    model, inputs = CausalLM(config, weights), {}
    for name, linear in model.linears().items():
        linear.observer = lambda x, name=name: inputs.__setitem__(name, x.flatten(0, 1).double())
    model(prepare(CALIBRATION, source, 128).tokens)
    shares = {slot.name: slot.shares for slot in linear_slots(config)}
    rtn, form = registry("methods").get("rtn"), registry("formats").get("pack-quantized")
    for name, x in inputs.items():
        weight = source.tensor(f"{name}.weight").float()
        codes = rtn.run(weight, None, measured.rows[name][2].spec, rtn.options())
        off = x @ (form.dequantize(form.pack(codes, torch.bfloat16)) - weight).double().T
        sharing = [given[other].double() for other in inputs if shares[other] == shares[name]]
        shape = torch.stack([squares / squares.mean() for squares in sharing]).mean(0)
        expected = 0.5 * given[name].double().mean() * (shape * off.square().sum(1)).mean()
        assert found[name][2] == pytest.approx(float(expected), rel=2e-3)


@torch.no_grad()
def divergence(measured, replaced):
    """Measured: KL in nats a token of the model with some weights replaced, on what it was calibrated on."""
    source = measured.source
    weights = Weights(source.tensor, source.tensors().__contains__, torch.float32)
    tokens = prepare(measured.plan.recipe.calibration, source, 128).tokens
    config = parse_config(source.config())
    model, other = CausalLM(config, weights), CausalLM(config, weights)
    for name, linear in other.linears().items():
        if name in replaced:
            linear.weight = PlainWeight(replaced[name])
    ours, theirs = model(tokens).double().log_softmax(-1), other(tokens).double().log_softmax(-1)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def rounded(measured, name, index):
    row = measured.rows[name][index]
    method, form = registry("methods").get(row.method), registry("formats").get(row.format)
    weight = measured.source.tensor(f"{name}.weight").float()
    return form.dequantize(form.pack(method.run(weight, None, row.spec, method.options()), torch.bfloat16))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_it_predicts_what_is_measured(tmp_path, family):
    measured = Measured(tiny_model(tmp_path / "model", family), CANDIDATES,
                        CalibrationSpec(windows=16, window=64))
    found = measured()
    predicted = {name: losses[2] for name, losses in found.items()}
    seen = {name: divergence(measured, {name: rounded(measured, name, 2)}) for name in found}
    for name in found:
        # attention averages values, so that their errors aren't independent from token to token
        assert 0.7 < seen[name] / predicted[name] < (5 if name.endswith("v_proj") else 1.7), name
    whole = divergence(measured, {name: rounded(measured, name, 2) for name in found})
    assert 0.8 < whole / sum(predicted.values()) < 1.6, "divergences of Linears add up"


def test_experts_count_by_the_tokens_that_reach_them(tmp_path):
    measured = Measured(tiny_model(tmp_path / "model", "mixtral"))
    found = measured()
    predicted = sum(losses[2] for losses in found.values())
    seen = divergence(measured, {name: rounded(measured, name, 2) for name in found})
    assert any(".experts." in name for name in found) and 0.5 < seen / predicted < 2


def test_a_rotation_is_measured_where_it_works(tmp_path):
    rotated = Candidate(method="gptq", spec=spec(3, rotation="hadamard"))
    trellis = Candidate(method="rtn", spec=QuantSpec(kind="trellis", bits=3, window=10, rotation="hadamard",
                                                     granularity=Granularity(strategy="channel")))
    measured = Measured(tiny_model(tmp_path / "model"), (CANDIDATES[1], rotated, trellis))
    found = measured()
    whole = [sum(losses.get(index, 0) for losses in found.values()) for index in range(3)]
    assert 0.3 < whole[1] / whole[0] < 3 and 0 < whole[2] < 10 * whole[0]


@pytest.mark.slow
def test_stopped_anywhere_and_run_again_it_finds_the_same(measured, folder, kept, monkeypatch, stop_at):
    whole = measured()
    for at in range(8):
        monkeypatch.setenv("QUANTKIT_CACHE", str(kept / str(at)))
        with pytest.raises(Stopped, match="is kept in") as caught:
            measured(progress=stop_at(at))
        assert "same command again" in caught.value.next
        assert measured() == whole


@pytest.mark.parametrize("at, left", [(0, 4), (1, 3), (2, 2), (3, 2), (4, 1), (5, 0)])
def test_walks_that_were_stopped_go_on_at_the_layer_they_had_reached(measured, kept, monkeypatch, stop_at, at,
                                                                     left):
    walked = []

    class Counted(importance.DecoderLayer):
        def __init__(self, *args):
            super().__init__(*args)
            walked.append(self)

    monkeypatch.setattr(importance, "DecoderLayer", Counted)
    with pytest.raises(Stopped):
        measured(progress=stop_at(at))
    walked.clear()
    assert measured() and len(walked) == left
    (only,) = kept.iterdir()
    assert not list(only.glob("*walks*"))


def test_what_is_kept_is_not_measured_again(measured, folder, kept, monkeypatch):
    whole = measured()
    (only,) = kept.iterdir()
    parts = [f"part-work-layer.{i}.{end}" for i in (0, 1) for end in ("json", "safetensors")]
    assert sorted(path.name for path in only.iterdir()) == ["lock", *parts, "state.json"]
    monkeypatch.setattr(module, "token_gradients", None)
    monkeypatch.setattr(module, "LayerRunner", None)
    assert measured() == whole
    assert str(folder.parent) not in (only / "state.json").read_text(), "no folder of this machine"


def test_damage_to_what_is_kept_is_measured_again(measured, kept):
    whole = measured()
    (only,) = kept.iterdir()
    part = only / "part-work-layer.1.safetensors"
    part.write_bytes(part.read_bytes()[:-8] + bytes(8))
    assert measured() == whole


@pytest.mark.parametrize("other", [{"seed": 1}, {"windows": 5}, {"window": 63}])
def test_another_text_is_another_measurement(measured, folder, kept, other):
    measured()
    Measured(folder, calibration=CALIBRATION.model_copy(update=other))()
    assert len(list(kept.iterdir())) == 2


def test_other_candidates_are_too(measured, folder, kept):
    first = measured()
    again = Measured(folder, CANDIDATES[1:])()
    assert len(list(kept.iterdir())) == 2
    assert all(again[name][0] == first[name][1] for name in first)


def test_layers_that_rules_take_are_not_measured(folder):
    rules = (Rule(match="model.layers.0.*", method="rtn", spec=spec(4)), Rule(match="*.down_proj"))
    found = Measured(folder, rules=rules)()
    assert [name.partition("layers.")[2] for name in found] == [
        f"1.{part}" for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                 "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")]


def test_the_model_may_write_the_text(folder, kept):
    measured = Measured(folder, CANDIDATES[-2:], CalibrationSpec(text="self", windows=2, window=24))
    whole = measured()
    (only,) = kept.iterdir()
    assert (only / "part-work-text.safetensors").is_file() and measured() == whole
    assert all(losses[0] > losses[1] == 0 for losses in whole.values())


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' of .* not finite"):
        Measured(folder)()
