"""Help, global options, and every kind of failure in words and exit codes."""

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from quantkit import __version__
from quantkit.cli import main as module
from quantkit.cli.options import command_line_again
from quantkit.plugins.manager import PluginInfo, registry
from quantkit.plugins.registry import RegistryEntry
from quantkit.support.errors import PluginError, QuantkitError, RecipeError, Stopped


@pytest.fixture
def command_that(monkeypatch, cli):
    """Call a command whose body is the given function."""

    def call(body, *arguments):
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        def probe(as_json):
            body()

        table = registry("commands")
        monkeypatch.setitem(table._claims, "probe", [RegistryEntry("command", "probe", probe, "tests")])
        monkeypatch.setitem(table._loaded, "probe", probe)
        return cli(*arguments) if arguments else cli("probe")

    return call


def raising(error):
    def body():
        raise error

    return body


def test_help_lists_every_command_with_its_line(cli):
    result = cli("--help")
    assert result.exit_code == 0
    for name in registry("commands"):
        assert f" {name} " in result.stdout
        assert registry("commands").entry(name).about["help"].split()[0] in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_version(cli):
    assert cli("--version").stdout == f"quantkit {__version__}\n"


def test_an_unknown_command_gets_the_nearest(cli):
    result = cli("quantise")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error: no command is called 'quantise'" in result.stderr
    assert "did you mean 'quantize'" in result.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["recipes", "lst"], "did you mean 'list'"), (["recipes", "list", "--jsn"], "did you mean '--json'"),
    (["verify"], "next: quantkit verify --help"), (["--nonsense"], "no such option"),
])
def test_wrong_usage_exits_2_and_says_how(cli, arguments, said):
    result = cli(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_our_errors_have_three_parts_and_their_exit_code(command_that):
    result = command_that(raising(QuantkitError("it broke", why="dust\nand sand", next="blow")))
    assert result.exit_code == 1
    assert result.stderr == "error: it broke\nwhy: dust\n     and sand\nnext: blow\n"
    assert command_that(raising(RecipeError("bad"))).exit_code == 2
    assert command_that(raising(Stopped("later"))).exit_code == 75


def test_ctrl_c_is_130(command_that):
    result = command_that(raising(KeyboardInterrupt()))
    assert result.exit_code == 130
    assert "interrupted" in result.stderr and "Traceback" not in result.stderr


def test_a_full_disk_is_an_error_and_no_traceback(command_that):
    result = command_that(raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/OUT")))
    assert result.exit_code == 1
    assert "error: /data/OUT: No space left on device" in result.stderr
    assert "next: free some space" in result.stderr


def test_a_missing_file_is_an_error(command_that):
    result = command_that(lambda: Path("/no/such/file").read_bytes())
    assert result.exit_code == 1 and "/no/such/file: No such file" in result.stderr


def test_anything_else_is_an_internal_error_in_one_line(command_that):
    result = command_that(raising(ZeroDivisionError("by zero\nsecond line")))
    assert result.exit_code == 1
    assert "error: internal error: ZeroDivisionError: by zero\n" in result.stderr
    assert "second line" not in result.stderr
    assert "--debug" in result.stderr and "Traceback" not in result.stderr


def test_an_internal_error_names_the_plugins_that_may_be_its_cause(command_that, monkeypatch):
    """Code of quantkit's fails on what a plugin returned: no frame of the plugin's is there."""
    loaded = SimpleNamespace(plugins=[PluginInfo("quantkit", "quantkit", "1"),
                                      PluginInfo("mine", "dist-mine", "1")])
    monkeypatch.setattr("quantkit.cli.main.current", lambda: loaded)
    result = command_that(raising(ZeroDivisionError("by zero")))
    assert result.exit_code == 1 and "quantkit plugins check mine" in result.stderr


def test_a_plugin_that_ends_the_process_is_named(command_that, monkeypatch):
    failure = PluginError("plugin 'mine' of dist-mine 1 failed: SystemExit: 4")
    monkeypatch.setattr("quantkit.cli.main.plugin_failure", lambda error: failure)
    result = command_that(raising(SystemExit(4)))
    assert result.exit_code == 1 and "plugin 'mine' of dist-mine 1 failed" in result.stderr


def test_the_command_can_be_said_again_with_debug(command_that):
    result = command_that(lambda: click.echo(command_line_again()), "probe", "--debug")
    assert (result.exit_code, result.stdout) == (0, "quantkit probe\n")


@pytest.mark.parametrize("arguments", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_a_traceback_wherever_it_stands(command_that, arguments):
    result = command_that(raising(ZeroDivisionError("by zero")), *arguments)
    assert "Traceback" in result.stderr and "ZeroDivisionError" in result.stderr
    again = command_that(raising(ZeroDivisionError("by zero")))
    assert "Traceback" not in again.stderr, "one call's --debug must not leak into the next"


def test_debug_by_environment(command_that, monkeypatch):
    monkeypatch.setenv("QUANTKIT_DEBUG", "1")
    assert "Traceback" in command_that(raising(QuantkitError("x"))).stderr
    monkeypatch.setenv("QUANTKIT_DEBUG", "0")
    assert "Traceback" not in command_that(raising(QuantkitError("x"))).stderr


def test_debug_below_a_group(cli):
    assert "Traceback" in cli("recipes", "show", "no-such", "--debug").stderr


def test_warnings_are_one_line_on_stderr(command_that):
    result = command_that(lambda: warnings.warn("a plugin\nwas left out", stacklevel=2))
    assert result.exit_code == 0
    assert result.stderr == "warning: a plugin was left out\n"
    assert result.stdout == ""


def test_a_reader_that_leaves_ends_it_quietly():
    """``quantkit plugins list --json | head -c 1`` prints no complaint."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", "plugins", "list", "--json"],
                              stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode != 0


def test_errors_are_colored_on_a_terminal_only(command_that, monkeypatch):
    assert "\x1b[" not in command_that(raising(QuantkitError("x"))).stderr
    from click.testing import CliRunner

    colored = CliRunner().invoke(module.main, ["no-such"], color=True)
    assert "\x1b[" in colored.stderr
