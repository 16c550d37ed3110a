"""What a program is told of positions."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.architecture import parse_config
from quantkit.runtime.rope_tables import rope_tables


@pytest.mark.parametrize("dim", [64, 36])
def test_a_positions_angles_do_not_depend_on_how_many_are_worked_out(dim):
    """A request beside a longer one reads the same."""
    config = parse_config({"model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 8,
                           "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": dim})
    (longest,) = rope_tables(config, 5000)
    for size in (1, 511, 512, 1024, 2500):
        for few, many in zip(next(iter(rope_tables(config, size))), longest):
            assert few.shape == (size, dim // 2) and torch.equal(few, many[:size])
