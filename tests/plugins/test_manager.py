"""The rules that plugins live by, each with a plugin that breaks it."""

import signal
import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from quantkit.plugins import manager as plugins
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import PluginManager
from quantkit.support.errors import PluginError


@pytest.fixture
def manager():
    return PluginManager(only=())


def plugin(**hooks):
    module = ModuleType("some_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


class Dist(SimpleNamespace):
    """As much of a distribution as an entry point is asked for."""


@pytest.fixture
def installed(monkeypatch):
    """Pretend that entry points are installed: name → what loading it gives or raises."""

    def install(**points):
        class Point:
            def __init__(self, name, result):
                self.name, self.value, self.result = name, f"mod_{name}", result
                self.dist = Dist(name=f"dist-{name}", version="1.2")

            def load(self):
                if isinstance(self.result, Exception):
                    raise self.result
                return self.result

        monkeypatch.setattr(plugins.importlib.metadata, "entry_points",
                            lambda group: [Point(n, r) for n, r in points.items()])

    return install


def test_the_builtins_come_through_the_same_hooks(manager):
    assert [p.distribution for p in manager.plugins] == ["quantkit"]
    assert {"rtn", "nf4", "gptq"} <= set(manager.registries["methods"])
    assert {e.owner for e in map(manager.registries["methods"].entry, manager.registries["methods"])} == {
        "quantkit"}


def test_a_plugin_registers_beside_them(manager):
    def register_methods(register):
        register("mine", "mine.method:METHOD", note="x")

    manager.add(plugin(register_methods=register_methods), "dist-mine", version="2.0")
    assert manager.registries["methods"].entry("mine").owner == "dist-mine"
    assert manager.plugins[-1].version == "2.0"
    assert "mine" not in sys.modules


def test_a_builtins_name_stays_its_own_and_the_warning_names_both(manager):
    def register_methods(register):
        register("rtn", "mine.method:METHOD")

    with pytest.warns(UserWarning, match="'rtn' is registered twice, by quantkit and by dist-mine"):
        manager.add(plugin(register_methods=register_methods), "dist-mine")
    assert manager.registries["methods"].entry("rtn").owner == "quantkit"


def test_two_strangers_collide_by_name(manager):
    def register_methods(register):
        register("same", "a.b:C")

    manager.add(plugin(register_methods=register_methods), "dist-one")
    with pytest.warns(UserWarning, match="by dist-one and by dist-two"):
        manager.add(plugin(register_methods=register_methods), "dist-two")
    with pytest.raises(PluginError, match="by dist-one and by dist-two"):
        manager.registries["methods"].get("same")


def test_a_misspelled_hook_is_an_error_with_the_nearest_name(manager):
    def register_method(register):
        pass

    with pytest.raises(PluginError, match="dist-mine implements a hook 'register_method'") as caught:
        manager.add(plugin(register_method=register_method), "dist-mine")
    assert "register_methods" in caught.value.why
    assert "quantkit" in caught.value.what


def test_a_wrong_signature_is_an_error(manager):
    def register_methods(register, table):
        pass

    with pytest.raises(PluginError, match="dist-mine") as caught:
        manager.add(plugin(register_methods=register_methods), "dist-mine")
    assert "table" in caught.value.why


def test_a_hook_may_ignore_its_argument(manager):
    def on_run_finished(kind):
        seen.append(kind)

    seen = []
    manager.add(plugin(on_run_finished=on_run_finished), "dist-mine")
    manager.notify("on_run_finished", kind="quantize", summary={})
    assert seen == ["quantize"]


def test_an_observer_that_raises_costs_a_warning(manager):
    def on_layer_quantized(name, row):
        raise RuntimeError("no disk")

    manager.add(plugin(on_layer_quantized=on_layer_quantized), "dist-mine")
    with pytest.warns(UserWarning, match=r"dist-mine.*on_layer_quantized.*no disk"):
        manager.notify("on_layer_quantized", name="a", row={})


def test_a_broken_import_costs_one_warning_and_its_own_things_only(installed):
    def register_methods(register):
        register("good", "a.b:C")

    installed(bad=ImportError("no module named left_pad"), good=plugin(register_methods=register_methods))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = PluginManager()
    assert len(caught) == 1
    assert "'bad'" in str(caught[0].message) and "dist-bad 1.2" in str(caught[0].message)
    assert "left_pad" in str(caught[0].message)
    assert "good" in manager.registries["methods"] and "rtn" in manager.registries["methods"]
    assert [p.error for p in manager.plugins if p.name == "bad"] == ["ImportError: no module named left_pad"]


def test_a_hook_that_raises_takes_back_all_that_its_plugin_registered(installed):
    def register_methods(register):
        register("half", "a.b:C")

    def register_formats(register):
        raise RuntimeError("later")

    installed(half=plugin(register_methods=register_methods, register_formats=register_formats))
    with pytest.warns(UserWarning, match="'half'"):
        manager = PluginManager()
    assert "half" not in manager.registries["methods"]
    assert "pack-quantized" in manager.registries["formats"]


def test_only_restricts(installed):
    def methods(name):
        return plugin(register_methods=lambda register: register(name, "a.b:C"))

    installed(one=methods("m1"), two=methods("m2"))
    assert "m1" in PluginManager(only=["one"]).registries["methods"]
    assert "m2" not in PluginManager(only=["one"]).registries["methods"]
    none = PluginManager(only=[]).registries["methods"]
    assert "m1" not in none and "m2" not in none and "rtn" in none
    both = PluginManager().registries["methods"]
    assert "m1" in both and "m2" in both


def test_only_with_an_unknown_name_is_an_error(installed):
    installed(hqq=plugin(on_run_finished=lambda kind: None))
    with pytest.raises(PluginError, match="'hqk'") as caught:
        PluginManager(only=["hqk"])
    assert "did you mean 'hqq'" in caught.value.why


def test_a_direct_add_that_fails_leaves_nothing(manager):
    thing = plugin(register_methods=lambda register: register("half", "a.b:C"),
                   register_formats=lambda register: 1 / 0)
    for _ in range(2):  # nor is it known from the first time
        with pytest.raises(PluginError, match="dist-mine fails in its hook register_formats"):
            manager.add(thing, "dist-mine")
    assert "half" not in manager.registries["methods"]
    assert [info.name for info in manager.plugins] == ["quantkit"]


def test_a_name_may_not_be_registered_for_somebody_else(manager):
    def register_methods(register):
        register("mine", "a.b:C", owner="quantkit", plugin="other")

    manager.add(plugin(register_methods=register_methods), "dist-mine")
    assert manager.registries["methods"].entry("mine").owner == "dist-mine"


def test_two_plugins_of_one_distribution_stand_for_themselves(installed, monkeypatch):
    def good(register):
        register("good", "a.b:C")

    def bad(register):
        raise RuntimeError("no")

    installed(good=plugin(register_methods=good), wrong=plugin(register_methods=bad))
    points = plugins.importlib.metadata.entry_points(group="quantkit")
    for point in points:
        point.dist = Dist(name="dist-both", version="1")
    monkeypatch.setattr(plugins.importlib.metadata, "entry_points", lambda group: points)
    with pytest.warns(UserWarning, match="'wrong' of dist-both 1 was left out"):
        manager = PluginManager()
    assert "good" in manager.registries["methods"]


def test_a_module_under_two_names_is_loaded_once(installed):
    module = plugin(register_methods=lambda register: register("once", "a.b:C"))
    installed(a=module, b=module)
    with pytest.warns(UserWarning, match="'b' of dist-b"):
        manager = PluginManager()
    assert manager.registries["methods"].entry("once").owner == "dist-a"
    assert [info.error is None for info in manager.plugins] == [True, True, False]


@pytest.mark.parametrize(("version", "oldest", "says"), [
    (3, 2, "run pip install . in a newer checkout of quantkit"), (1, 2, "pip install --upgrade dist-mine"),
    (2, 2, ""), (None, 1, "is for version None")])
def test_a_plugin_for_another_api_says_what_to_upgrade(manager, monkeypatch, version, oldest, says):
    monkeypatch.setattr("quantkit.plugins.manager.API_VERSION", 2)
    monkeypatch.setattr("quantkit.plugins.manager.OLDEST_API_VERSION", oldest)
    module = plugin(on_run_finished=lambda kind: None)
    module.QUANTKIT_API = version
    if says:
        with pytest.raises(PluginError) as caught:
            manager.add(module, "dist-mine")
        assert says in str(caught.value) and "dist-mine" in caught.value.what
    else:
        manager.add(module, "dist-mine")
        assert manager.plugins[-1].api == 2


def test_an_observer_that_always_raises_warns_once(manager):
    def on_layer_quantized(name):
        raise RuntimeError(name)

    manager.add(plugin(on_layer_quantized=on_layer_quantized), "dist-mine")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in "abc":
            manager.notify("on_layer_quantized", name=name, row={})
    assert len(caught) == 1


def test_an_observer_that_ends_the_process_costs_a_warning(manager):
    manager.add(plugin(on_run_finished=lambda kind: sys.exit(3)), "dist-mine")
    with pytest.warns(UserWarning, match="dist-mine.*on_run_finished: SystemExit: 3"):
        manager.notify("on_run_finished", kind="quantize", summary={})


def test_an_interrupt_in_an_observer_is_the_users(manager):
    manager.add(plugin(on_run_finished=lambda kind: signal.raise_signal(signal.SIGINT)), "dist-mine")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            manager.notify("on_run_finished", kind="quantize", summary={})
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_plugin_prints_stays_off_stdout(installed, capsys):
    installed(loud=plugin(register_methods=lambda register: print("hello")))
    PluginManager()
    captured = capsys.readouterr()
    assert captured.out == "" and "hello" in captured.err


def test_a_shipped_recipe_stays_what_it_is(manager, tmp_path):
    for owner, names in (("dist-one", ("int8", "b")), ("dist-two", ("b",))):
        (tmp_path / owner).mkdir()
        for name in names:
            (tmp_path / owner / f"{name}.yaml").touch()
        manager.add(plugin(recipe_dirs=lambda owner=owner: [tmp_path / owner]), owner)
    with pytest.warns(UserWarning, match="int8.yaml of dist-one is left out") as caught:
        files = manager.files("recipe_dirs")
    assert len(caught) == 1
    assert [(info.distribution, path.stem) for info, path in files if path.stem in ("int8", "b")] == [
        ("quantkit", "int8"), ("dist-one", "b"), ("dist-two", "b")]


@pytest.mark.parametrize(("value", "expected"),
                         [("", []), ("a", ["a"]), (" a , b ,", ["a", "b"]), (None, None)])
def test_the_environment_variable_is_parsed(monkeypatch, value, expected):
    seen = []
    monkeypatch.setattr(plugins, "PluginManager", lambda only: seen.append(only))
    if value is None:
        monkeypatch.delenv("QUANTKIT_PLUGINS")
    else:
        monkeypatch.setenv("QUANTKIT_PLUGINS", value)
    plugins.current.cache_clear()
    try:
        plugins.current()
    finally:
        monkeypatch.undo()
        plugins.current.cache_clear()
    assert seen == [expected]


def test_tests_load_no_plugins():
    assert [p.distribution for p in plugins.current().plugins] == ["quantkit"]


HEAVY = ("torch", "numpy", "pydantic", "transformers", "triton", "safetensors", "tokenizers",
         "huggingface_hub", "gguf", "ruamel")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plugins", "list"],
                                       ["plugins", "list", "--json"], ["no-such-command"]])
def test_listing_imports_nothing_heavy(arguments):
    code = (f"import sys\nfrom quantkit.cli.main import main\n"
            f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
            f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stdout + done.stderr


def test_help_imports_no_command():
    code = ("import sys\nfrom quantkit.cli.main import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
            "print(sorted(m for m in sys.modules if m.startswith('quantkit.cli.')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    modules = [f"quantkit.cli.{name}" for name in ("main", "present")]
    assert done.stdout.splitlines()[-1] == str(modules)
