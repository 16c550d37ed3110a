"""What a quantize run made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.manifest import CalibrationFacts, LayerRow, RecoveryRecord
from quantkit.quantization.planning.plan import Plan


@dataclass(frozen=True)
class QuantizeResult:
    """What a run made.

    Attributes:
        out: the checkpoint's folder.
        plan: what was to be done; exact in bits and bytes.
        rows: what was done, a row a Linear.
        fallbacks: every note of every row, with its layer's name, and that on the calibration text.
        resumed: units that an earlier attempt had finished.
        seconds: of this attempt.
        calibration: what the calibrated methods saw, if there were any.
        recovery: what training of scales and norms came to, if the recipe asks for it.
    """

    out: Path
    plan: Plan
    rows: tuple[LayerRow, ...]
    fallbacks: tuple[str, ...]
    resumed: int
    seconds: float
    calibration: CalibrationFacts | None = None
    recovery: RecoveryRecord | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        facts = self.calibration.model_dump(mode="json") if self.calibration else None
        recovery = {"recovery": self.recovery.model_dump(mode="json")} if self.recovery else {}
        return {"out": str(self.out), "bits_per_weight": self.plan.bits_per_weight,
                "tensor_bytes": self.plan.disk_bytes, "resumed_units": self.resumed,
                "seconds": self.seconds, "fallbacks": list(self.fallbacks), "calibration": facts,
                "layers": [row.to_dict() for row in self.rows]} | recovery
