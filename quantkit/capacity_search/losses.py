"""The quality that each recipe and each codec costs, measured on one small model: ``evals/losses.json``."""

from __future__ import annotations

import functools

from pydantic import Field

from quantkit.support.errors import QuantkitError
from quantkit.support.frozen import Frozen
from quantkit.support.paths import data_dir

FILE = "losses.json"


class Loss(Frozen):
    """One figure.

    Attributes:
        kl: divergence from the model as it is, in nats a token.
        source: the file that holds it: one of ``evals/results``, or a page of ``docs``.
        note: the measurement, where that isn't just what the name says.
    """

    kl: float = Field(ge=0, allow_inf_nan=False)
    source: str = Field(min_length=1)
    note: str = ""


class Losses(Frozen):
    """All figures of one model.

    Attributes:
        model: on which they were measured.
        weights: by recipe; ``none`` is the model as it is.
        kv: by KV setting, as ``str`` of a :class:`~quantkit.kv.spec.KVSpec` writes it.
        weights_measured, kv_measured: how.
    """

    model: str
    weights_measured: str
    kv_measured: str
    weights: dict[str, Loss]
    kv: dict[str, Loss]

    def of_weights(self, name: str) -> float | None:
        """A recipe's, if it was measured."""
        return self.weights[name].kl if name in self.weights else None

    def of_kv(self, setting: str) -> float | None:
        """A setting's, if it was measured."""
        return self.kv[setting].kl if setting in self.kv else None


@functools.cache
def losses() -> Losses:
    """The losses that are shipped. Raises QuantkitError if this install lacks them."""
    path = data_dir("evals") / FILE
    try:
        return Losses.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise QuantkitError(f"{path} can't be read", why=str(error), next="install quantkit again") from None
