"""A peer's process: what it answers, and how it fails."""

import sys

import pytest

from quantkit.evaluation.peers.process import WorkerSession
from quantkit.support.errors import QuantkitError

BACKEND = '''
import os, struct, sys

class Model:
    def __init__(self, options):
        self.options = options
        self.steps = 0
        print("words that a library prints")
        if options.get("asks"):
            input("may I run code of this repository? ")

    def facts(self):
        return {"tool": "fake 1", "method": "m", "vocab_size": 3}

    def encode(self, text):
        return [ord(letter) for letter in text]

    def logits(self, ids, skip):
        if ids[0] == 13:
            raise ValueError("unlucky")
        if ids[0] == 14:
            sys.stderr.write("out of luck\\n")
            sys.stderr.flush()
            os._exit(7)
        rows = [struct.pack("<3f", token, skip, 0.5) for token in ids[skip:-1]]
        return (2**30 if ids[0] == 15 else 3), iter(rows)

    def prefill(self, ids):
        self.steps = 0
        return 1

    def step(self, token):
        self.steps += 1
        assert self.steps <= 4
        return token

def open_model(options):
    return Model(options)
'''


@pytest.fixture
def session(tmp_path):
    sessions = []

    def make(backend=BACKEND, python=sys.executable, **options):
        (tmp_path / "backend.py").write_text(backend, encoding="utf-8")
        sessions.append(WorkerSession("fake", python, str(tmp_path / "backend.py"), options, "do this"))
        return sessions[-1]

    yield make
    for made in sessions:
        made.close()
        made.close()


def test_it_answers(session):
    made = session()
    assert made.facts.tool == "fake 1" and made.facts.bits_per_weight is None
    assert made.encode("ab") == [97, 98]
    assert made.predict([4, 5, 6, 7], 1).logits.tolist() == [[5, 1, 0.5], [6, 1, 0.5]]
    times = made.time([[1, 2], [3, 4], [5, 6]], 4)
    assert len(times.prefill_tok_s) == len(times.decode_tok_s) == len(times.first_token_s) == 2
    assert times.peak_bytes > 2**20


def test_an_error_is_told_and_the_process_goes_on(session):
    made = session()
    with pytest.raises(QuantkitError, match="unlucky"):
        made.predict([13, 1, 2], 0)
    assert made.encode("a") == [97]


def test_a_process_that_dies_says_its_last_words(session):
    with pytest.raises(QuantkitError, match="ended with code 7: out of luck"):
        session().predict([14, 1, 2], 0)


def test_logits_of_a_size_that_nobody_has_are_refused(session):
    with pytest.raises(QuantkitError, match="another shape"):
        session().predict([15, 1, 2], 0)


def test_a_model_that_cannot_be_opened(session):
    with pytest.raises(QuantkitError, match="EOFError") as caught:
        session(asks=True)
    assert caught.value.next == "do this"
    with pytest.raises(QuantkitError, match="No module named 'nothing_like_this'"):
        session(BACKEND + "\nimport nothing_like_this\n")
    with pytest.raises(QuantkitError, match="can't be started"):
        session(python="/nowhere/python")


def test_the_folder_of_the_user_gives_no_modules(session, tmp_path, monkeypatch):
    (tmp_path / "struct.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert session().encode("a") == [97]
