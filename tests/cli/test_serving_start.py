"""What goes beside loading: imports without the collector, the tokenizer, the program."""

import gc
import sys
import threading

import pytest

from quantkit.cli.loading import collector_paused, import_large
from quantkit.cli.serve.models import ServingStart
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.support.errors import SourceError


def test_the_collector_is_paused_while_modules_are_imported(monkeypatch, tmp_path):
    (tmp_path / "imported_large.py").write_text("import gc\nENABLED = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    gc.enable()  # a start that was given up elsewhere may still import
    import_large("imported_large")
    assert not sys.modules.pop("imported_large").ENABLED and gc.isenabled()
    with pytest.raises(ImportError):
        import_large("quantkit.no_such_module")
    assert gc.isenabled()
    with collector_paused(), collector_paused():
        pass
    assert gc.isenabled()


def test_the_first_request_finds_its_program(tiny):
    with ServingStart() as start:
        loaded = load(str(tiny), on_tokenizer=start.take_tokenizer)
        engine = Engine(loaded)
        assert not loaded.model._programs
        start.take_engine(engine)
    assert "quantkit.serving.app" in sys.modules and "controls" in vars(loaded.tokenizer)
    (program,) = loaded.model._programs.values()
    loaded.model(*_step(loaded, engine))
    assert list(loaded.model._programs.values()) == [program]


def _step(loaded, engine):
    import torch

    from quantkit.kv.batch import Batch

    return torch.tensor([[1, 2, 3]]), None, Batch(engine.cache, [engine.cache.add()])


class Broken:
    def prepare(self):
        raise SourceError("the tokenizer fails")


class Slow:
    """A tokenizer that isn't done before the test is."""

    def __init__(self):
        self.begun, self.released = threading.Event(), threading.Event()

    def prepare(self):
        self.begun.set()
        assert self.released.wait(60)


@pytest.fixture
def slow():
    tokenizer = Slow()
    yield tokenizer
    tokenizer.released.set()


def test_what_goes_wrong_beside_is_raised_at_once(slow):
    with pytest.raises(SourceError, match="the tokenizer fails"), ServingStart() as start:
        start.take_tokenizer(slow)
        start.take_tokenizer(Broken())
    assert slow.begun.is_set() and not slow.released.is_set()


@pytest.mark.parametrize("error", [SourceError("the model fails"), KeyboardInterrupt()])
def test_after_an_error_nothing_more_is_begun(slow, error):
    others = [Slow(), Slow()]
    with pytest.raises(type(error)) as raised, ServingStart() as start:
        for tokenizer in (slow, *others):
            start.take_tokenizer(tokenizer)
        assert slow.begun.wait(60) and others[0].begun.wait(60)  # two at once
        raise error
    assert raised.value is error and not others[1].begun.is_set()
    slow.released.set()
    others[0].released.set()
    for thread in start._threads._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not others[1].begun.is_set()


@pytest.mark.parametrize(("error", "code"), [(SourceError("the weights are broken"), 1),
                                             (KeyboardInterrupt(), 130)])
def test_an_error_while_a_model_loads_ends_the_command(cli, tiny, monkeypatch, error, code):
    starts = []

    class Watched(ServingStart):
        def __init__(self):
            super().__init__()
            starts.append(self)

    def broken(*_, **__):
        assert not gc.isenabled()
        raise error

    monkeypatch.setattr("quantkit.cli.serve.models.ServingStart", Watched)
    monkeypatch.setattr("quantkit.runtime.loader.build_model", broken)
    result = cli("serve-local", tiny, "--port", "0")
    assert result.exit_code == code and ("the weights are broken" in result.stderr or code == 130)
    with pytest.raises(RuntimeError, match="after shutdown"):
        starts[0].take_tokenizer(Broken())
    assert gc.isenabled()


def test_collections_while_answers_wait_look_only_at_what_is_new(cli, tiny, monkeypatch):
    seen = []
    monkeypatch.setattr("quantkit.serving.server.Server.run",
                        lambda self, sockets: seen.append((gc.isenabled(), gc.get_freeze_count())))
    try:
        assert cli("serve-local", tiny, "--port", "0").exit_code == 0
    finally:
        gc.unfreeze()
    ((enabled, frozen),) = seen
    assert enabled and frozen > 100_000
