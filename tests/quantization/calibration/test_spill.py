"""Hidden states in memory and on disk come back as they were, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from quantkit.quantization.calibration.spill import Spill


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0, 100, 1 << 20])
def test_what_was_put_is_taken(tmp_path, dtype, limit):
    random = torch.Generator().manual_seed(0)
    made = {f"{i}.0": torch.randn(2, 3, 4, generator=random).to(dtype) for i in range(5)}
    with Spill(tmp_path / "states", limit) as spill:
        for key, tensor in made.items():
            spill.put(key, tensor)
        held = limit // made["0.0"].nbytes
        files = sorted(path.name for path in (tmp_path / "states").glob("*"))
        assert files == sorted(made)[min(held, 5):]
        for key, tensor in reversed(made.items()):
            assert torch.equal(spill.take(key), tensor)
            with pytest.raises(KeyError):
                spill.take(key)
        assert list((tmp_path / "states").glob("*")) == []
    assert not (tmp_path / "states").exists()


def test_room_is_given_back(tmp_path):
    with Spill(tmp_path / "states", 16) as spill:
        for i in range(3):
            spill.put(str(i), torch.ones(4))
            spill.take(str(i))
        assert not (tmp_path / "states").exists()


def test_what_an_earlier_run_left_goes_and_so_does_this_ones_after_an_error(tmp_path):
    folder = tmp_path / "states"
    folder.mkdir()
    (folder / "old").write_bytes(b"x")
    with pytest.raises(RuntimeError), Spill(folder, 0) as spill:
        assert not folder.exists()
        spill.put("a", torch.ones(3))
        raise RuntimeError
    assert not folder.exists()


def test_a_tensor_that_is_a_view_is_written_whole(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    with Spill(tmp_path / "states", 0) as spill:
        spill.put("a", whole.T[1:3])
        assert torch.equal(spill.take("a"), whole.T[1:3])
