from __future__ import annotations

import pytest
import torch

from quantkit.plugins.manager import registry
from quantkit.sources.base import SourceKind, TensorInfo
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_model


def test_bytes_of_a_tensor():
    assert TensorInfo("a", (3, 5), torch.bfloat16).nbytes == 30
    assert TensorInfo("a", (), torch.float32).nbytes == 4
    assert TensorInfo("a", (0, 9), torch.int64).nbytes == 0


def test_every_kind_is_complete():
    kinds = registry("sources")
    assert set(kinds) == {"synthetic", "package", "gguf", "local", "hub"}
    assert all(isinstance(kinds.get(name), SourceKind) and kinds.get(name).example for name in kinds)


@pytest.mark.parametrize("uri", ["nothing", "a/b/c", "", "http://x/y/z", "a b"])
def test_what_nobody_takes(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="no model found") as caught:
        open_source(uri)
    assert caught.value.next


def test_a_folder_comes_before_the_hub(tmp_path, monkeypatch):
    """``owner/name`` is a folder if there is one: no network is asked."""
    tiny_model(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_source("owner/name").identity().kind == "local"
