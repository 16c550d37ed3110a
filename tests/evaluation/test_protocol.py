"""The protocol: what it says, and that its fingerprint is of what decides quality."""

import json
from dataclasses import fields, replace

import pytest

from quantkit.evaluation.protocol import Protocol, cpu_cores, cpu_name

BASE = Protocol(text="t.txt", text_sha256="a" * 64, tokens_sha256="b" * 64, window=512, windows=40,
                words=9000, dtype="bfloat16", prefill=256, decode=32, repeats=3, quantkit="0.1", torch="2.13",
                cpu="cpu", cores=2, threads=2)


@pytest.mark.parametrize("change", [{"text_sha256": "c" * 64}, {"tokens_sha256": "c" * 64}, {"window": 256},
                                    {"windows": 39}, {"dtype": "float32"}, {"bos": "each"}])
def test_what_changes_quality_changes_the_fingerprint(change):
    assert replace(BASE, **change).fingerprint != BASE.fingerprint


@pytest.mark.parametrize("change", [{"text": "other.txt"}, {"threads": 8}, {"cpu": "faster"}, {"repeats": 5}])
def test_what_does_not_change_quality_does_not(change):
    assert replace(BASE, **change).fingerprint == BASE.fingerprint


def test_it_states_everything():
    data = BASE.to_dict()
    assert data["stride"] == 512 and data["scored"] == 40 * 511 and len(data["fingerprint"]) == 12
    text = " ".join(BASE.lines())
    for piece in ("t.txt", "40 windows of 512", "20440 predictions", "bfloat16", "256 tokens in", "32 out",
                  BASE.fingerprint):
        assert piece in text
    assert "speed was not measured" in " ".join(replace(BASE, repeats=0).lines())


def test_the_machine():
    assert cpu_name() and cpu_cores() >= 1


def test_the_stored_form_is_complete_and_plain():
    data = json.loads(json.dumps(BASE.to_dict()))
    assert {f.name for f in fields(Protocol)} | {"stride", "scored", "fingerprint"} == set(data)
