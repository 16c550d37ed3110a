"""A transform that presents a whole model in another form, as a plugin may: every other value is halved
where v writes it, and doubled where o reads it."""

from __future__ import annotations

import torch

from quantkit.plugins.hooks import hookimpl
from quantkit.quantization.transforms.base import Transform
from quantkit.sources.wrapper import SourceWrapper


class HalvedSource(SourceWrapper):
    def config(self):
        return self._source.config()

    def tensors(self):
        return self._source.tensors()

    def tensor(self, name):
        tensor = self._source.tensor(name)
        if ".v_proj." in name:
            return tensor * every_other(tensor.shape[0], 0.5).view(-1, *[1] * (tensor.dim() - 1)).to(tensor)
        if name.endswith(".o_proj.weight"):
            return tensor * every_other(tensor.shape[1], 2.0).to(tensor)
        return tensor


def every_other(count, factor):
    return torch.tensor([factor, 1.0]).repeat(count // 2)


HALVED = Transform("halved", "https://example.org",
                   source=lambda source, config, options: HalvedSource(source))


class HalvedPlugin:
    @hookimpl
    def register_transforms(self, register):
        register("halved", HALVED)
