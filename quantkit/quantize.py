"""The orchestrator of the left half: source × recipe → checkpoint, one decoder layer at a time.

Every decoder layer is a *unit*: read, measured, solved, packed and made durable before the next one
is touched. A run that is stopped at any instant and started again skips the units that are on disk,
pushes the calibration text through them, and ends with the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.calibrate.runner import LayerRunner
from quantkit.calibrate.text import calibration_tokens
from quantkit.checkpoint.manifest import CalibrationFacts, LayerRow, Manifest
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.errors import QuantkitError, RecipeError, SpecError, Stopped
from quantkit.formats.base import QuantizedTensor
from quantkit.methods.base import LayerStats
from quantkit.models.architecture import parse_config
from quantkit.models.linear import Weights
from quantkit.plan import Plan, PlanRow, make_plan
from quantkit.plugins import current, registry
from quantkit.recipe import Recipe, load_recipe
from quantkit.runtime_text import Tokenizer
from quantkit.sources.base import ModelSource, open_source
from quantkit.spec import CalibrationSpec

LAYER_PREFIX = "model.layers."
