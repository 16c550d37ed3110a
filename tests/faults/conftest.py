"""A run small enough to be killed at every one of its writes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint import durable
from quantkit.checkpoint.manifest import LayerRow, Manifest, SourceRecord
from quantkit.checkpoint.open import open_checkpoint, open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.formats.base import Codes
from quantkit.formats.pack_quantized import FORMAT
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.support.errors import CheckpointError, QuantkitError

SPEC = QuantSpec(bits=4, granularity=Granularity(strategy="group", size=32), scale_dtype="float32")

CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 96, "intermediate_size": 64,
          "num_hidden_layers": 3, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
          "tie_word_embeddings": True}


class Run:
    """Three units; every call makes the same bytes, as a quantization run does."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.units = {}
        for index in range(3):
            name = f"model.layers.{index}.mlp.up_proj"
            codes = Codes(SPEC, torch.randint(0, 16, (64, 96), generator=random, dtype=torch.uint8),
                          torch.rand(64, 3, generator=random))
            packed = FORMAT.pack(codes, torch.float32)
            row = LayerRow(name=name, shape=(64, 96), dtype="float32", method="rtn", format=FORMAT.name,
                           spec=SPEC, bits=8 * packed.nbytes / (64 * 96), bytes=packed.nbytes, error=0.1)
            tensors = {f"{name}.{suffix}": t for suffix, t in packed.tensors.items()}
            self.units[f"model.layers.{index}"] = (tensors, [row.to_dict()])
        self.manifest = Manifest(quantkit_version="0", recipe={"name": "r"},
                                 source=SourceRecord(kind="hub", uri="o/n"))
        self.made: list[str] = []

    def __call__(self, out: Path, identity: dict | None = None, **options) -> Path:
        """What the orchestrator does: put what is missing, read what is there, finish."""
        self.made = []
        with CheckpointWriter(out, identity or {"run": 1}, **options) as writer:
            for unit, (tensors, rows) in self.units.items():
                if writer.finished:
                    continue
                if writer.has(unit):
                    found, found_rows = writer.get(unit)
                    assert found_rows == rows and all(torch.equal(found[n], t) for n, t in tensors.items())
                else:
                    self.made.append(unit)
                    writer.put(unit, tensors, rows)
            return writer.finish(CONFIG, {"tokenizer.json": b"{}"}, self.manifest)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch) -> None:
    """What a process has written outlives its death, synced or not; only a power cut asks for more."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session")
def run():
    return Run()


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    return lambda folder: {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="session")
def reference(run, contents, tmp_path_factory):
    """The bytes of an undisturbed run."""
    return contents(run(tmp_path_factory.mktemp("reference") / "out"))


@pytest.fixture(scope="session")
def steps(run, tmp_path_factory) -> list[str]:
    """Every numbered write point of a run, in order."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "step", seen.append)
        run(tmp_path_factory.mktemp("steps") / "out")
    return seen


@pytest.fixture
def at_step(monkeypatch):
    """``at_step(n, action)``: ``action()`` happens instead of the nth step from now on."""

    def arm(number: int, action: Callable[[], object]) -> None:
        count = iter(range(10**9))

        def step(what: str) -> None:
            if next(count) == number:
                action()

        monkeypatch.setattr(durable, "step", step)

    yield arm


@pytest.fixture
def in_child():
    """``in_child(work)`` runs ``work`` in a forked process; returns its exit code, −9 if it was killed."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")

    def start(work: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = int(work() or 0)  # type: ignore[call-overload]
            except BaseException:
                code = 1
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return start


@pytest.fixture
def refused_without_rights(in_child):
    """``refused_without_rights(work)``: to a user with none it is an error that says where to go."""
    def check(work: Callable[[], object]) -> None:
        def as_a_nobody() -> int:
            if os.geteuid() == 0:
                os.setuid(65534)
            try:
                work()
            except CheckpointError as error:
                return 7 if "can't be made" in error.what and "choose another --out" in error.next else 8
            return 0

        assert in_child(as_a_nobody) == 7

    return check


@pytest.fixture
def nothing_loads(contents) -> Callable[[Path, dict[str, bytes]], None]:
    """``nothing_loads(out, reference)``: what a run has left beside ``out`` is refused by whoever opens it,
    where it lies and when somebody has copied it away before it was whole."""

    def refused(folder: Path) -> None:
        for opener in (Checkpoint.open, open_checkpoint, lambda path: open_model(str(path))):
            with pytest.raises(QuantkitError):
                opener(folder)

    def check(out: Path, reference: dict[str, bytes]) -> None:
        partial = out.with_name(out.name + ".partial")
        inner, copy = partial / "checkpoint", out.with_name("copied")
        if not (partial / "state.json").exists():
            return  # it is over, but for the empty folder
        refused(partial)
        if not inner.exists():
            return
        refused(inner)
        shutil.copytree(inner, copy, ignore=shutil.ignore_patterns("*.tmp"))
        if contents(copy) != reference:
            refused(copy)
            assert not (copy / "config.json").exists(), "other engines would load it"
        shutil.rmtree(copy)

    return check


@pytest.fixture(scope="session")
def kill():
    return lambda: os.kill(os.getpid(), signal.SIGKILL)
