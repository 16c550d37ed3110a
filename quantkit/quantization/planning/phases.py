"""The phases of a run, as progress names and counts them."""

from __future__ import annotations

from quantkit.quantization.calibration.prepare import writes_itself
from quantkit.quantization.specs import CalibrationSpec
from quantkit.support.progress import Phases, ProgressEvent

WRITING, MEASURING = "writing calibration text", "measuring candidates"
FORWARD, BACKWARD = "weighing tokens forward", "weighing tokens backward"
QUANTIZING, ASSEMBLING = "quantizing layers", "assembling and rereading"
READING, RECOVERING = "running the original model", "training scales and norms"


def run_phases(spec: CalibrationSpec | None, weighed: bool, recovered: bool = False) -> tuple[str, ...]:
    """Of a run that quantizes.

    Args:
        spec: its calibration, if there is any.
        weighed: the tokens of its text are weighed.
        recovered: scales and norms are trained at the end.
    """
    return (*_text(spec), *([FORWARD, BACKWARD] if weighed else []), QUANTIZING,
            *([READING, RECOVERING] if recovered else []), ASSEMBLING)


def budget_phases(spec: CalibrationSpec | None) -> tuple[str, ...]:
    """Of measuring what each layer costs at each width."""
    return (*_text(spec), FORWARD, BACKWARD, MEASURING)


def tell_weighing(phases: Phases, done: int, layers: int, backward: bool = True) -> None:
    """Tell of tokens that are weighed; a layer takes longer backward than forward.

    Args:
        phases: of the run.
        done: layers that were walked through, forward and backward together.
        layers: of the model.
        backward: whether the walk goes back.
    """
    name = BACKWARD if backward and done >= layers else FORWARD
    phases(name)(ProgressEvent(done - layers if name == BACKWARD else done, layers,
                               "what each token matters"))


def _text(spec: CalibrationSpec | None) -> list[str]:
    return [WRITING] if writes_itself(spec) else []
