"""The phases of a run, as progress names and counts them."""

from __future__ import annotations

from quantkit.calibrate.prepare import writes_itself
from quantkit.spec import CalibrationSpec

WRITING, WEIGHING, MEASURING = "writing calibration text", "weighing tokens", "measuring candidates"
QUANTIZING, ASSEMBLING = "quantizing layers", "assembling and rereading"


def run_phases(spec: CalibrationSpec | None, weighed: bool) -> tuple[str, ...]:
    """Of a run that quantizes.

    Args:
        spec: its calibration, if there is any.
        weighed: the tokens of its text are weighed.
    """
    return (*_text(spec), *([WEIGHING] if weighed else []), QUANTIZING, ASSEMBLING)


def budget_phases(spec: CalibrationSpec | None) -> tuple[str, ...]:
    """Of measuring what each layer costs at each width."""
    return (*_text(spec), WEIGHING, MEASURING)


def _text(spec: CalibrationSpec | None) -> list[str]:
    return [WRITING] if writes_itself(spec) else []
