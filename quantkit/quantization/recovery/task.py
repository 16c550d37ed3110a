"""What a recovery is given: the loss on training windows, and a place for its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from quantkit.checkpoint.work import WorkStore
from quantkit.quantization.calibration.finite import NonFiniteError
from quantkit.quantization.recovery.base import Parameter, Values
from quantkit.quantization.recovery.walk import QuantizedWalk

TARGETS, STATES, NUMBER = "targets", ("state-a", "state-b"), "number"
"""What a run keeps: the original model's last states; the recovery's state, in two places by turns, so that a
run that is stopped while one is written has the other; the number of times that it was saved."""


class Task:
    """See :class:`quantkit.quantization.recovery.base.RecoveryTask`.

    Args:
        walk: computes losses and gradients.
        parameters: that can be trained.
        tokens: the training windows, int64 ``[windows, length]``.
        batch: windows in each of the stored batches of targets.
        store: where targets are, and where states are kept.
        step: told of finished steps and of all.
    """

    def __init__(self, walk: QuantizedWalk, parameters: Mapping[str, Parameter], tokens: torch.Tensor,
                 batch: int, store: WorkStore, step: Callable[[int, int], None]) -> None:
        self._walk, self._tokens, self._batch, self._store, self._step = walk, tokens, batch, store, step
        self._number = 0
        self.parameters, self.windows = parameters, tokens.shape[0]

    def gradient(self, values: Values, windows: Sequence[int]) -> tuple[float, dict[str, torch.Tensor]]:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""
        every = {name: parameter.start for name, parameter in self.parameters.items()} | dict(values)
        try:
            return self._walk.gradient(every, self._tokens[list(windows)],
                                       targets(self._store, windows, self._batch))
        except NonFiniteError as error:
            raise error if error.sample is None else error.in_window(windows[error.sample]) from error

    def saved(self) -> dict[str, torch.Tensor] | None:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""
        numbers = {int(self._store.tensor(key, NUMBER)): key for key in STATES if self._store.has(key)}
        if not numbers:
            return None
        self._number = max(numbers)
        state = self._store.get(numbers[self._number])
        del state[NUMBER]
        return {name.removeprefix("."): tensor for name, tensor in state.items()}

    def save(self, state: Values) -> None:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""
        self._number += 1
        self._store.put(STATES[self._number % 2], {NUMBER: torch.tensor(self._number)} | {
            f".{name}": tensor.contiguous() for name, tensor in state.items()})

    def tell(self, done: int, total: int) -> None:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""
        self._step(done, total)


def targets(store: WorkStore, windows: Sequence[int], batch: int) -> torch.Tensor:
    """What the original model's final norm gives of some windows, ``[windows, length, hidden]``."""
    return torch.stack([store.batch(TARGETS, window // batch)[window % batch] for window in windows])
