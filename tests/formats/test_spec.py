"""What a spec may say, how it is called; specs from before a field existed are written as they were."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.recipe import default_format

CHANNEL = Granularity(strategy="channel")


def test_a_spec_without_activations_is_written_as_before_they_could_be_said():
    written = {"kind": "int", "bits": 8, "symmetric": True, "scale_dtype": "model", "nested": False,
               "granularity": {"strategy": "channel", "size": None}}
    spec = QuantSpec(bits=8, granularity=CHANNEL)
    assert spec.model_dump() == spec.model_dump(mode="json") == written
    assert QuantSpec.model_validate(written) == spec and spec.activations is None


def test_activations_are_written_and_read():
    spec = QuantSpec(bits=8, granularity=CHANNEL, activations="token")
    assert spec.model_dump(mode="json")["activations"] == "token"
    assert QuantSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(("keys", "label", "layout"), [
    ({"bits": 8}, "int8 channel sym", "pack-quantized"),
    ({"bits": 8, "activations": "token"}, "int8 channel sym a8", "int-quantized"),
    ({"kind": "fp", "bits": 8}, "fp8 channel", "float-quantized"),
    ({"kind": "fp", "bits": 8, "activations": "token"}, "fp8 channel a8", "float-quantized")])
def test_names_and_layouts(keys, label, layout):
    spec = QuantSpec(granularity=CHANNEL, **keys)
    assert spec.label() == label and default_format(spec) == layout


@pytest.mark.parametrize("keys", [
    {"kind": "fp", "bits": 4}, {"kind": "fp", "bits": 8, "symmetric": False},
    {"kind": "fp", "bits": 8, "granularity": Granularity(strategy="group", size=32)},
    {"bits": 4, "activations": "token"}, {"bits": 8, "symmetric": False, "activations": "token"},
    {"bits": 8, "granularity": Granularity(strategy="group", size=32), "activations": "token"},
    {"kind": "nf", "bits": 4, "granularity": Granularity(strategy="block", size=64), "activations": "token"},
    {"bits": 8, "activations": "tensor"}], ids=str)
def test_what_makes_no_sense_is_refused(keys):
    with pytest.raises(ValidationError):
        QuantSpec(**{"granularity": CHANNEL} | keys)


GROUP16 = {"kind": "fp", "bits": 4, "scale_dtype": "e4m3",
           "granularity": Granularity(strategy="group", size=16)}


def test_what_is_measured_of_inputs_before_a_model_runs():
    assert QuantSpec(**GROUP16, activations="group").static_inputs
    assert not QuantSpec(**GROUP16).static_inputs
    power = GROUP16 | {"scale_dtype": "e8m0", "granularity": Granularity(strategy="group", size=32)}
    assert not QuantSpec(**power, activations="group").static_inputs
    with pytest.raises(ValidationError, match="measured as they come, not rotated"):
        QuantSpec(**GROUP16, activations="group", rotation="hadamard")
