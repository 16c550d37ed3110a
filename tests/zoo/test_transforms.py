"""Broken transforms, each a correct one with one fault, and what ``check_transform`` says of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.models.scale_groups import scale_groups
from quantkit.quantization.transforms.base import Transform
from quantkit.support.errors import PluginError
from quantkit.testing import check_transform
from tests.helpers.halved import HALVED, HalvedSource


def first_group(config, index, tensors, by):
    tensors.scale(next(scale_groups(config, index)), by)


def halves(config, index, tensors, options):
    first_group(config, index, tensors, torch.full((config.hidden_size,), 2.0))


SOUND = Transform("sound", "https://example.org", layer=halves, needs=frozenset({"largest"}))


def one_sided(config, index, tensors, options):
    name = f"{next(scale_groups(config, index)).readers[0]}.weight"
    tensors.changed[name] = tensors.tensor(name) * 2


def draws(config, index, tensors, options):
    first_group(config, index, tensors, 1 + torch.rand(config.hidden_size))


def draws_and_throws_away(config, index, tensors, options):
    torch.rand(1)
    halves(config, index, tensors, options)


def rounds(config, index, tensors, options):
    name = f"model.layers.{index}.input_layernorm.weight"
    tensors.changed[name] = tensors.tensor(name).bfloat16()



def by_largest(config, index, tensors, options):
    group = next(scale_groups(config, index))
    tensors.scale(group, tensors.stats[group.readers[0]].largest.clamp(min=1).sqrt())


def returns(config, index, tensors, options):
    halves(config, index, tensors, options)
    return tensors.changed


def another_name(config, index, tensors, options):
    halves(config, index, tensors, options)
    tensors.changed["model.layers.0.extra.weight"] = torch.ones(2)


def another_shape(config, index, tensors, options):
    tensors.changed[f"model.layers.{index}.input_layernorm.weight"] = torch.ones(3)


def raises(config, index, tensors, options):
    raise ValueError("no such layer")


class Untied(HalvedSource):
    def config(self):
        return {**self._source.config(), "head_dim": 7}


class Written(HalvedSource):
    def tensor(self, name):
        return super().tensor(name).double()


ZOO = {
    "changes one side": (replace(SOUND, layer=one_sided), "logits differ"),
    "draws": (replace(SOUND, layer=draws), "two runs differ"),
    "draws for nothing": (replace(SOUND, layer=draws_and_throws_away), "global random generator"),
    "rounds": (replace(SOUND, layer=rounds), "logits differ"),
    "reads what it doesn't declare": (replace(SOUND, layer=by_largest, needs=frozenset({"hessian"})),
                                      r"reads stats.*largest without declaring"),
    "is never called": (replace(SOUND, needs=frozenset()), "changes layers and needs no statistics"),
    "returns tensors": (replace(SOUND, layer=returns), "layer returned a dict"),
    "changes what there isn't": (replace(SOUND, layer=another_name), "which no such model has"),
    "changes a shape": (replace(SOUND, layer=another_shape), r"input_layernorm.weight \[3\], it was \[64\]"),
    "raises": (replace(SOUND, layer=raises), "layer 0 raises ValueError: no such layer"),
    "another config": (replace(HALVED, source=lambda source, config, options: Untied(source)),
                       "its config"),
    "another dtype": (replace(HALVED, source=lambda source, config, options: Written(source)),
                      "as it is announced"),
    "no source": (replace(HALVED, source=lambda source, config, options: None), "source returned a NoneType"),
    "refuses everything": (replace(SOUND, refuses=lambda config: "no"), "refuses every family"),
    "refuses with True": (replace(SOUND, refuses=lambda config: True), "the reason as a sentence"),
    "refuses by raising": (replace(SOUND, refuses=lambda config: config.no_such_field),
                           "refuses raises AttributeError"),
    "no paper": (replace(SOUND, paper=""), "paper is ''"),
    "needs a string": (replace(SOUND, needs="hessian"), "needs is 'hessian'"),
    "no transform": (halves, "it is a function, not a Transform"),
}


@pytest.mark.parametrize("fault", ZOO)
def test_the_kit_notices(fault: str) -> None:
    transform, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        check_transform(transform, ["llama", "gemma2"])


@pytest.mark.parametrize("transform", [SOUND, replace(SOUND, layer=by_largest), HALVED],
                         ids=["fixed", "measured", "whole model"])
def test_a_sound_transform_passes(transform: Transform) -> None:
    check_transform(transform, ["llama", "mixtral"])
