"""A transform that presents a whole model in another form, as a plugin may: values are halved where v writes
them, and doubled where o reads them."""

from __future__ import annotations

from quantkit.plugins.hooks import hookimpl
from quantkit.quantization.transforms.base import Transform
from quantkit.sources.wrapper import SourceWrapper


class HalvedSource(SourceWrapper):
    def config(self):
        return self._source.config()

    def tensors(self):
        return self._source.tensors()

    def tensor(self, name):
        factor = {"v_proj": 0.5, "o_proj": 2.0}.get(name.split(".")[-2] if "." in name else "", 1.0)
        return self._source.tensor(name) * factor


HALVED = Transform("halved", "https://example.org",
                   source=lambda source, config, options: HalvedSource(source))


class HalvedPlugin:
    @hookimpl
    def register_transforms(self, register):
        register("halved", HALVED)
