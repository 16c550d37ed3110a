"""The layer-by-layer run equals the whole model, with and without replaced layers."""

import gc
import weakref

import pytest
import torch

from quantkit.formats.pack_quantized import FORMAT
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import linear_slots, parse_config
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.ops.stored_weight import PlainWeight
from quantkit.quantization.calibration import runner as module
from quantkit.quantization.calibration.finite import NonFiniteError
from quantkit.quantization.calibration.runner import HessianObserver, LayerRunner
from quantkit.quantization.methods.rounding import RTN as METHOD
from quantkit.quantization.methods.rounding import RtnOptions
from quantkit.support.errors import CalibrationError
from quantkit.testing import tiny_weights
from tests.helpers.shapes import THREE_LAYERS

TOKENS = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))


class Model:
    """Tensors by name, and which of them were asked for."""

    def __init__(self) -> None:
        self.tensors, self.asked = tiny_weights(THREE_LAYERS), list[str]()
        self.config: ModelConfig = parse_config(THREE_LAYERS)
        self.weights = Weights(self._tensor, self.tensors.__contains__, torch.float32)

    def _tensor(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self.tensors[name]

    def runner(self) -> LayerRunner:
        return LayerRunner(self.config, self.weights, TOKENS)

    def whole(self) -> CausalLM:
        return CausalLM(self.config, self.weights)


@pytest.fixture(params=[4096, 24], ids=["one batch", "batches of two"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(module, "BATCH_TOKENS", request.param)
    return Model()


def expected_stats(whole: CausalLM, names: list[str]) -> dict[str, torch.Tensor]:
    observers = {}
    for name, linear in whole.linears().items():
        if name in names:
            observers[name] = linear.observer = HessianObserver(name)
    whole(TOKENS)
    found = {name: observer.result().hessian for name, observer in observers.items()}
    return {name: hessian for name, hessian in found.items() if hessian is not None}


def test_statistics_equal_those_of_the_whole_model(model: Model) -> None:
    expected = expected_stats(model.whole(), [slot.name for slot in linear_slots(model.config)])
    runner, compared = model.runner(), 0
    for index in range(3):
        stats = runner.measure(index)
        assert len({id(one) for one in stats.values()}) == 4, "q, k, v share one input, gate and up another"
        for name, hessian in expected.items():
            if name.startswith(f"model.layers.{index}."):
                measured = stats[name]
                assert measured.tokens == TOKENS.numel() and measured.hessian is not None
                torch.testing.assert_close(measured.hessian, hessian, rtol=1e-4, atol=1e-5)
                compared += 1
        runner.advance(index, {})
        assert runner.next == index + 1
    assert compared == 21


def test_errors_of_replaced_weights_reach_the_next_layer(model: Model) -> None:
    spec = QuantSpec(bits=3, granularity=Granularity(strategy="group", size=16), scale_dtype="float32")
    names = [slot.name for slot in linear_slots(model.config) if slot.layer == 0]
    packed = {name: FORMAT.pack(METHOD.run(model.tensors[f"{name}.weight"], None, spec, RtnOptions()),
                                torch.float32) for name in names}
    runner, plain, untouched = model.runner(), model.runner(), model.runner()
    runner.advance(0, packed)
    plain.advance(0, {name: FORMAT.dequantize(weight) for name, weight in packed.items()})
    untouched.advance(0, {})
    whole = model.whole()
    for name in names:
        whole.linears()[name].weight = PlainWeight(FORMAT.dequantize(packed[name]))
    expected = expected_stats(whole, ["model.layers.1.mlp.down_proj"])["model.layers.1.mlp.down_proj"]
    measured, same, other = (
        one.measure(1, {"model.layers.1.mlp.down_proj": {"hessian"}})["model.layers.1.mlp.down_proj"].hessian
        for one in (runner, plain, untouched))
    assert measured is not None and same is not None and other is not None
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(measured, same)
    assert float((measured - other).abs().max()) > 1e-3


def test_only_what_is_wanted_is_measured(model: Model) -> None:
    runner = model.runner()
    name = "model.layers.0.self_attn.v_proj"
    assert list(runner.measure(0, {name: {"hessian"}})) == [name]
    assert runner.measure(0, {}) == {}


def test_one_layer_is_read_at_a_time_and_dropped(model: Model) -> None:
    runner = model.runner()
    assert set(model.asked) == {"model.embed_tokens.weight"}
    model.asked.clear()
    runner.measure(0)
    assert model.asked and all(name.startswith("model.layers.0.") for name in model.asked)
    count = len(model.asked)
    layer = weakref.ref(runner._layer)  # type: ignore[arg-type]
    runner.advance(0, {})
    assert len(model.asked) == count, "the layer was read once"
    gc.collect()
    assert layer() is None


def test_layers_come_in_order(model: Model) -> None:
    runner = model.runner()
    with pytest.raises(ValueError, match="layer 1 was asked for"):
        runner.measure(1)
    runner.advance(0, {})
    with pytest.raises(ValueError, match="layer 0 was asked for"):
        runner.advance(0, {})


def test_a_value_that_is_not_finite_names_sample_and_layer(model: Model) -> None:
    word = int(TOKENS[3, 0])
    others = TOKENS[[0, 1, 2, 4]]
    tokens = TOKENS.clone()
    tokens[[0, 1, 2, 4]] = torch.where(others == word, (word + 1) % 50, others)
    model.tensors["model.embed_tokens.weight"][word, 5] = float("nan")
    with pytest.raises(CalibrationError, match=r"after the embedding is NaN or infinite in .* window 3"):
        LayerRunner(model.config, model.weights, tokens)


def test_the_first_tensor_that_is_not_finite_is_named(model: Model) -> None:
    model.tensors["model.layers.0.mlp.up_proj.weight"][:] = 3e38
    with pytest.raises(NonFiniteError, match=r"output of model\.layers\.0\.mlp\.up_proj") as caught:
        model.runner().measure(0)
    assert (caught.value.sample, caught.value.layer) == (0, 0)
    model.tensors["model.layers.0.post_attention_layernorm.weight"][3] = float("inf")
    with pytest.raises(NonFiniteError, match=r"input of model\.layers\.0\.mlp\.gate_proj") as caught:
        model.runner().measure(0, {"model.layers.0.mlp.down_proj": {"hessian"}})
    assert caught.value.sample == 0


def test_a_window_that_overflows_alone_is_named(model: Model) -> None:
    """One token, which only the fourth window has, is in a direction that the first layer blows up."""
    word = int(TOKENS[3, 5])
    tokens = torch.where(word == TOKENS, (word + 1) % 50, TOKENS)
    tokens[3, 5] = word
    model.tensors["model.embed_tokens.weight"][:, 7] = 0
    model.tensors["model.embed_tokens.weight"][word, 7] = 10
    model.tensors["model.layers.0.self_attn.o_proj.weight"][7] = 0
    for name in ("gate_proj", "up_proj"):
        model.tensors[f"model.layers.0.mlp.{name}.weight"][:, 7] = 1e30
    for measuring in (True, False):
        runner = LayerRunner(model.config, model.weights, tokens)
        with pytest.raises(NonFiniteError, match="in calibration window 3") as caught:
            runner.measure(0) if measuring else runner.advance(0, {})
        assert caught.value.tensor == "the input of model.layers.0.mlp.down_proj is NaN or infinite"


def test_bfloat16_states() -> None:
    one = Model()
    weights = Weights(one.tensors.__getitem__, one.tensors.__contains__, torch.bfloat16)
    stats = LayerRunner(one.config, weights, TOKENS).measure(0)["model.layers.0.self_attn.q_proj"]
    exact = one.runner().measure(0)["model.layers.0.self_attn.q_proj"]
    assert stats.hessian is not None and exact.hessian is not None and stats.hessian.dtype == torch.float32
    assert float((stats.hessian - exact.hessian).abs().max()) < 0.05 * float(exact.hessian.abs().max())


@pytest.mark.parametrize("weighed", [False, True])
def test_the_head_is_measured_behind_the_final_norm(model: Model, weighed: bool) -> None:
    whole, entered = model.whole(), []
    whole.head.observer = entered.append
    whole(TOKENS)
    rows = torch.cat([one.flatten(0, 1) for one in entered])
    name = "model.embed_tokens"
    weights = torch.rand(TOKENS.numel(), generator=torch.Generator().manual_seed(1))
    runner = LayerRunner(model.config, model.weights, TOKENS, {name: weights} if weighed else None)
    for index in range(3):
        with pytest.raises(ValueError, match="the hidden states are at"):
            runner.measure_head(name)
        runner.advance(index, {})
    stats = runner.measure_head(name)
    expected = (rows * (weights[:, None] if weighed else 1)).T @ rows / len(rows)
    assert stats.tokens == TOKENS.numel()
    torch.testing.assert_close(stats.hessian, expected, rtol=1e-4, atol=1e-5)


def test_a_quantized_embedding_is_what_the_first_layer_sees(model: Model) -> None:
    spec = QuantSpec(bits=3, granularity=Granularity(strategy="channel"), scale_dtype="float32")
    table = model.tensors["model.embed_tokens.weight"]
    packed = FORMAT.pack(METHOD.run(table, None, spec, RtnOptions()), torch.float32)
    rounded = Model()
    rounded.tensors["model.embed_tokens.weight"] = FORMAT.dequantize(packed)
    names = [slot.name for slot in linear_slots(model.config) if slot.layer == 0]
    expected = rounded.runner().measure(0)
    found = LayerRunner(model.config, model.weights, TOKENS, table=packed).measure(0)
    for name in names:
        torch.testing.assert_close(found[name].hessian, expected[name].hessian)


def test_a_final_norm_that_overflows_is_named_with_its_window(model: Model) -> None:
    model.tensors["model.norm.weight"][3] = float("inf")
    runner = model.runner()
    for index in range(3):
        runner.advance(index, {})
    with pytest.raises(NonFiniteError, match="input of lm_head is NaN or infinite in calibration window 0"):
        runner.measure_head("lm_head")
