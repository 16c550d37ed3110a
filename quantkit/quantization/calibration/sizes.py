"""How much calibration holds in memory at a time. The predicted peak memory of a plan is made of these."""

from __future__ import annotations

BATCH_TOKENS = 4096
"""Tokens in one forward pass of a layer: enough to keep the cores busy, few enough to stay small."""
BACKWARD_TOKENS = 2048
"""Tokens (or one sample, if that is longer) in one backward pass of a layer, which keeps its activations."""
BACKWARD_LOGITS = 1 << 23
"""The least number of logits that are in memory at a time. The allocator returns a block of this many floats,
32 MiB, to the system when it is freed; smaller blocks would stay on a growing heap."""
WRITTEN = 32
"""Calibration windows that a model writes at a time, where it writes them itself."""
STATES_IN_MEMORY = 1 << 30
"""Bytes of hidden states above which those between two layers are kept on disk."""
RECOVERY_STATES = 1 << 28
"""The same while scales and norms are trained, where what enters every layer is kept of some windows."""
