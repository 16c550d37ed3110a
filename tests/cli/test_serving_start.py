"""What goes beside loading: imports without the collector, the tokenizer, the program."""

import gc
import sys

import pytest

from quantkit.cli.imports import collector_paused, import_large
from quantkit.cli.serving_start import ServingStart
from quantkit.errors import SourceError
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load


def test_the_collector_is_paused_while_modules_are_imported(monkeypatch, tmp_path):
    (tmp_path / "imported_large.py").write_text("import gc\nENABLED = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert gc.isenabled()
    import_large("imported_large")
    assert not sys.modules.pop("imported_large").ENABLED and gc.isenabled()
    with pytest.raises(ImportError):
        import_large("quantkit.no_such_module")
    assert gc.isenabled()
    with collector_paused(), collector_paused():
        pass
    assert gc.isenabled()


def test_the_first_request_finds_its_program(tiny):
    start = ServingStart()
    loaded = load(str(tiny), on_tokenizer=start.take_tokenizer)
    engine = Engine(loaded)
    assert not loaded.model._programs
    start.take_engine(engine)
    start.wait()
    assert "quantkit.serve.app" in sys.modules and "controls" in vars(loaded.tokenizer)
    (program,) = loaded.model._programs.values()
    loaded.model(*_step(loaded, engine))
    assert list(loaded.model._programs.values()) == [program]


def _step(loaded, engine):
    import torch

    from quantkit.kv.batch import Batch

    return torch.tensor([[1, 2, 3]]), None, Batch(engine.cache, [engine.cache.add()])


def test_what_goes_wrong_beside_is_raised(tiny):
    class Broken:
        def prepare(self):
            raise SourceError("the tokenizer fails")

    start = ServingStart()
    start.take_tokenizer(Broken())
    with pytest.raises(SourceError, match="the tokenizer fails"):
        start.wait()
