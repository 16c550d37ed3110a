"""What a recovery is given: where its state is kept."""

from __future__ import annotations

import torch

from quantkit.checkpoint.work import WorkStore
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.quantization.recovery.task import Task


def test_of_two_states_the_newer_is_read_alone(tmp_path, monkeypatch):
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        store = WorkStore(writer, "recover")
        task = Task(None, {}, torch.zeros(2, 4), 1, store, lambda done, total: None)
        assert task.saved() is None
        for number in range(3):
            task.save({"number": torch.tensor(number)})
        reads = []
        get = store.get
        monkeypatch.setattr(store, "get", lambda key: (reads.append(key), get(key))[1])
        again = Task(None, {}, torch.zeros(2, 4), 1, store, lambda done, total: None)
        assert again.saved() == {"number": torch.tensor(2)} and len(reads) == 1
        again.save({"number": torch.tensor(3)})
        assert task.saved() == {"number": torch.tensor(3)}
