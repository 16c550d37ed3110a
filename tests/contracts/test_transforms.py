"""Every registered transform keeps the promises of ``transforms/base.py``; the kit notices a broken one."""

from dataclasses import replace

import pytest
import torch

from quantkit.errors import PluginError
from quantkit.methods.base import MethodOptions
from quantkit.models.config import ModelConfig
from quantkit.models.scale_groups import scale_groups
from quantkit.plugins import registry
from quantkit.testing import check_transform
from quantkit.transforms.awq import TRANSFORM as AWQ
from quantkit.transforms.base import LayerTensors
from quantkit.transforms.rotate import TRANSFORM as ROTATE
from quantkit.transforms.rotate import RotatedSource


@pytest.mark.parametrize("name", sorted(registry("transforms")))
def test_registered_transforms(name: str) -> None:
    transform = registry("transforms").get(name)
    assert transform.name == name and transform.paper.startswith("https://")
    check_transform(transform)


def one_sided(config: ModelConfig, index: int, tensors: LayerTensors, options: MethodOptions) -> None:
    name = f"{next(scale_groups(config, index)).readers[0]}.weight"
    tensors.changed[name] = tensors.tensor(name) * 2


def random(config: ModelConfig, index: int, tensors: LayerTensors, options: MethodOptions) -> None:
    tensors.scale(next(scale_groups(config, index)), 1 + torch.rand(config.hidden_size))


def careless(config: ModelConfig, index: int, tensors: LayerTensors, options: MethodOptions) -> None:
    name = f"model.layers.{index}.input_layernorm.weight"
    tensors.changed[name] = tensors.tensor(name).bfloat16()


class Tied(RotatedSource):
    def config(self):
        return self._source.config()


@pytest.mark.parametrize("broken, said", [
    (replace(AWQ, layer=one_sided), "logits differ"), (replace(AWQ, layer=random), "two runs differ"),
    (replace(AWQ, layer=careless), "logits differ"),
    (replace(ROTATE, source=lambda source, config, options: Tied(source, config, True)), "its config"),
    (replace(AWQ, refuses=lambda config: "no"), "refuses every family")])
def test_a_broken_one_is_noticed(broken, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        check_transform(broken, ["llama", "gemma2"])
