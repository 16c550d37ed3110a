"""Pieces of work are kept whole, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings

import numpy as np
import pytest

from quantkit.evaluation.sweep import store as module
from quantkit.evaluation.sweep.store import MeasuredData, MeasurementResult, MeasurementStore
from quantkit.support.errors import QuantkitError

KEY = {"kind": "quality", "model": "abc", "windows": 3}


class Numbers(MeasuredData):
    """Of a measurement."""

    rows: tuple[dict[str, float], ...]


RESULT = MeasurementResult(Numbers(rows=({"kl": 0.25},)), {
    "0/kl": np.arange(6, dtype=np.float32).reshape(2, 3),
                                                "0/agrees": np.array([True, False])},
                     "2026-01-01T00:00:00+00:00", 1.5)


def test_what_was_kept_comes_back(tmp_path):
    store = MeasurementStore(tmp_path)
    assert store.get(KEY, Numbers) is None
    store.put(KEY, RESULT)
    known = MeasurementStore(tmp_path).get(dict(reversed(KEY.items())), Numbers)
    assert known is not None and known.data == RESULT.data
    assert (known.measured, known.seconds) == (RESULT.measured, RESULT.seconds)
    for name, array in RESULT.arrays.items():
        assert known.arrays[name].dtype == array.dtype and (known.arrays[name] == array).all()
    assert store.get(KEY | {"windows": 4}, Numbers) is None


def test_without_a_folder_nothing_is_kept():
    store = MeasurementStore(None)
    store.put(KEY, RESULT)
    assert store.get(KEY, Numbers) is None


@pytest.mark.parametrize("damage", ["cut", "gone", "other", "garbage", "flipped", "moved",
                                    "device", "pipe"])
def test_what_is_damaged_is_made_again(tmp_path, damage):
    store = MeasurementStore(tmp_path)
    store.put(KEY, RESULT)
    (place,) = tmp_path.iterdir()
    data, arrays = place / "measurement.json", place / "tokens.safetensors"
    if damage == "cut":
        arrays.write_bytes(arrays.read_bytes()[:-3])
    elif damage == "gone":
        arrays.unlink()
    elif damage in ("device", "pipe"):
        for file in (data, arrays):
            file.unlink()
            file.symlink_to("/dev/zero") if damage == "device" else os.mkfifo(file)
    elif damage == "other":
        data.write_text("[1, 2]")
    elif damage == "flipped":
        arrays.write_bytes(arrays.read_bytes()[:-1] + b"\x07")
    elif damage == "moved":
        store.put(KEY | {"windows": 4}, RESULT)
        (other,) = (path for path in tmp_path.iterdir() if path != place)
        shutil.rmtree(place)
        other.rename(place)
    else:
        data.write_bytes(b"\xff\x00")
    with pytest.warns(UserWarning, match="made again"):
        assert store.get(KEY, Numbers) is None
    store.put(KEY, RESULT)
    assert store.get(KEY, Numbers) is not None


def test_a_full_disk_leaves_nothing_half(tmp_path, monkeypatch):
    store = MeasurementStore(tmp_path)

    def fails(path, chunks):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_file", fails)
    with pytest.raises(QuantkitError, match="can't be kept") as caught:
        store.put(KEY, RESULT)
    assert "No space" in caught.value.why and "QUANTKIT_CACHE" in caught.value.next
    assert list(tmp_path.iterdir()) == [] and store.get(KEY, Numbers) is None


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    stores, errors = [MeasurementStore(tmp_path) for _ in range(4)], []

    def work(store):
        try:
            for number in range(20):
                store.put(KEY | {"windows": number}, RESULT)
                known = store.get(KEY | {"windows": number}, Numbers)
                assert known is None or known.data == RESULT.data
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one reads what another replaces
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == [] and not list(tmp_path.glob(".new-*"))


def test_a_look_is_enough_to_count(tmp_path):
    store = MeasurementStore(tmp_path)
    assert not store.has(KEY)
    store.put(KEY, RESULT)
    assert store.has(KEY) and not store.has(None) and not MeasurementStore(None).has(KEY)
