"""Folders that another run removes meanwhile."""

import pytest

from quantkit.checkpoint.durable import FolderLock, bytes_in, names_in
from quantkit.errors import CheckpointError


def test_a_folder_that_its_run_has_just_removed_is_another_run_s(tmp_path):
    """Whoever saw it a moment ago is told so, and not that it can't be made."""
    with pytest.raises(CheckpointError, match="another quantkit is writing"):
        FolderLock(tmp_path / "out.partial" / "lock")
    assert names_in(tmp_path / "out.partial") == set() and bytes_in(tmp_path / "out.partial") == 0
    (tmp_path / "file").write_text("four")
    assert names_in(tmp_path / "file") == set() and bytes_in(tmp_path) == 4
    assert names_in(tmp_path) == {"file"}
