"""Finds the first value that isn't finite: its window, its layer and its tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from quantkit.formats.finite import all_finite
from quantkit.models.linear import Linear, Watcher
from quantkit.support.errors import CalibrationError

LAYERS = "model.layers."
LARGEST = 1e18
"""Of a Linear's inputs: the squares of larger ones, weighted and summed, are beyond float32."""
NEXT = "use other calibration data, or check the model with quantkit eval"


class NonFiniteError(CalibrationError):
    """A value that calibration met is NaN, infinite, or too large to be squared.

    Args:
        tensor: names the tensor and what is wrong with it.
        sample: the calibration window, if it is known.
        layer: index of the decoder layer; ``None`` before and after them.
        why: gives the numbers.
    """

    def __init__(self, tensor: str, *, sample: int | None = None, layer: int | None = None,
                 why: str | None = None) -> None:
        self.tensor, self.sample = tensor, sample
        self.layer = layer
        window = "" if sample is None else f" in calibration window {sample}"
        super().__init__(tensor + window, why=why, next=NEXT)

    def in_window(self, sample: int) -> NonFiniteError:
        """The same in another window."""
        return NonFiniteError(self.tensor, sample=sample, layer=self.layer, why=self.why)


def check_finite_input(x: torch.Tensor, name: str) -> None:
    """Raises NonFiniteError if a value of the Linear ``name``'s input is no number below :data:`LARGEST`."""
    peak = float(torch.maximum(-x.amin(), x.amax())) if x.numel() else 0.0
    if peak < LARGEST:
        return
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise NonFiniteError(f"the input of {name} is NaN or infinite", why=f"{bad} of {x.numel()} values")
    raise NonFiniteError(f"the input of {name} is too large for float32 sums of squares",
                         why=f"its largest value is {peak:.3g}")


def check_finite_states(states: torch.Tensor, first: int, what: str, layer: int | None = None) -> None:
    """``what``, states ``[B, T, …]`` of the samples from ``first`` on, must be finite.

    Raises:
        NonFiniteError: it isn't; sample and tensor are named.
    """
    if all_finite(states):
        return
    for sample, state in enumerate(states, first):
        if bad := int((~torch.isfinite(state)).sum()):
            raise NonFiniteError(f"{what} is NaN or infinite", sample=sample,
                                 layer=layer, why=f"{bad} of {state.numel()} values")


def behind(layer: int) -> str:
    """What a layer leaves, for messages."""
    return f"the hidden state after {LAYERS}{layer}"


def first_nonfinite(run: Callable[[int], torch.Tensor], linears: Mapping[str, Linear], samples: int,
                    first: int, layer: int, what: str | None = None) -> NonFiniteError | None:
    """Run samples through a layer again, one at a time, and stop at the first tensor that isn't finite.

    Args:
        run: the layer: a sample's place → what leaves, ``[1, T, …]``.
        linears: the layer's, by full name; their observers are replaced meanwhile.
        samples: the number of samples.
        first: the first one's number.
        what: names what leaves, if that isn't the layer's hidden state.

    Returns:
        An error that names window, layer and tensor; ``None`` if all is finite.
    """
    before = {name: (linear.observer, linear.on_output) for name, linear in linears.items()}
    for name, linear in linears.items():
        linear.observer = _input_watch(name)
        linear.on_output = _output_watch(name)
    try:
        for place in range(samples):
            sample = first + place
            try:
                check_finite_states(run(place), sample, what or behind(layer))
            except NonFiniteError as error:
                return NonFiniteError(error.tensor, sample=sample, layer=layer, why=error.why)
    finally:
        for name, linear in linears.items():
            linear.observer, linear.on_output = before[name]
    return None


def _input_watch(name: str) -> Watcher:
    def watch(x: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        check_finite_input(x, name)

    return watch


def _output_watch(name: str) -> Watcher:
    def watch(y: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        if bad := int((~torch.isfinite(y)).sum()):
            raise NonFiniteError(f"the output of {name} is NaN or infinite",
                                 why=f"{bad} of {y.numel()} values")

    return watch


def blame(error: NonFiniteError, origins: Sequence[str],
          kind: str = "calibration window") -> CalibrationError:
    """The error in full: where the window came from. No weight is to blame: what isn't finite is refused
    when it is read.

    Args:
        origins: the place where each window begins, if that is known.
        kind: names the windows.
    """
    window = ""
    if error.sample is not None:
        window = f" in {kind} {error.sample}"
        if error.sample < len(origins):
            window += f" ({origins[error.sample]})"
    finite = "every weight there is finite: the values overflow"
    return CalibrationError(f"{error.tensor}{window}", why=f"{error.why}; {finite}" if error.why else finite,
                            next=error.next)
