"""The ``quantkit`` command: finds subcommands in the registry and prints every failure as a message.

``quantkit --help`` shows each command's registered help line and imports no command: neither torch
nor pydantic is loaded before a command needs it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import rich_click as click

from quantkit import __version__
from quantkit.cli.present import show_error, show_warning
from quantkit.plugins.blame import plugin_failure
from quantkit.plugins.manager import BUILTIN, current, registry
from quantkit.support.errors import FAILED, INTERRUPTED, QuantkitError, UsageError, did_you_mean
from quantkit.support.progress import Listener, ProgressEvent, compiling

DEBUG_VARIABLE = "QUANTKIT_DEBUG"
_OUTPUT = ("--out", "--report", "--plot", "--trace", "--quiet", "--json")
_MODEL = ("--random", "--revision", "--dtype", "--device", "--verify", "--no-fallback", "--pdl")
PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "serve-local": {
        "Address and access": ("--host", "--port", "--allow-host", "--api-key-file"),
        "Models": ("--name", *_MODEL, "--draft"),
        "Requests": ("--strict-requests", "--json-calls", "--chat-template", "--parse-special-tokens"),
        "Memory": ("--kv", "--kv-memory", "--prefix-cache", "--overcommit"),
        "Scheduling": ("--max-batch", "--max-queue", "--scheduling-policy", "--max-itl", "--replicas",
                       "--drain-timeout"),
        "Output": _OUTPUT,
    },
    "quantize": {
        "What is made": ("--recipe", "--budget", "--out", "--dry-run", "--layers"),
        "Calibration": ("--calibration", "--windows", "--window", "--packing", "--avoid", "--seed"),
        "How it runs": ("--device", "--executor", "--strict", "--revision"),
        "Output": ("--quiet", "--json"),
    },
    "eval": {
        "What is compared": ("--recipe", "--kv", "--peer", *_MODEL),
        "Quality": ("--suite", "--text", "--window", "--windows", "--prompt-tokens", "--noise-floor",
                    "--tasks", "--task-data", "--limit"),
        "Speed": ("--no-speed", "--prefill", "--max-tokens", "--repeats"),
        "Verdict": ("--gate", "--gate-strict"),
        "How it runs": ("--executor", "--fresh"),
        "Output": _OUTPUT,
    },
    "eval-long": {
        "What is measured": ("--kv", "--tasks", "--context", "--depths", "--samples", "--question",
                             "--prompt-tokens", "--max-tokens"),
        "Texts": ("--text", "--filler", "--chat", "--seed"),
        "Model": _MODEL,
        "How it runs": ("--fresh",),
        "Output": _OUTPUT,
    },
    "generate": {
        "Prompt": ("--chat", "--system", "--parse-special-tokens"),
        "Sampling": ("--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p",
                     "--repetition-penalty", "--seed", "--stop", "--ignore-eos"),
        "Model": (*_MODEL, "--kv", "--draft"),
        "Output": _OUTPUT,
    },
    "bench decode": {
        "What is measured": ("--batch", "--context", "--kv", "--prefill", "--max-tokens", "--repeats"),
        "Model": _MODEL,
        "Output": _OUTPUT,
    },
}
"""Command → panel of its ``--help`` → options; what no panel names is in the last one."""
click.rich_click.OPTION_GROUPS.update({
    f"quantkit {command}": [{"name": name, "options": [*options]} for name, options in panels.items()]
    for command, panels in PANELS.items()})


class CommandGroup(click.RichGroup):
    """A group whose subcommands are the registered ``commands``, loaded one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of registration, the built-ins first."""
        return list(registry("commands"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A stand-in that carries the help line only; :meth:`resolve_command` gives the real one."""
        table = registry("commands")
        if cmd_name not in list(table):  # a contested name isn't listed
            return None
        line = str(table.entry(cmd_name).about.get("help") or "")
        return click.RichCommand(name=cmd_name, help=" ".join(line.split()))

    def resolve_command(self, ctx: click.Context,
                        args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the command that ``args`` names. Raises UsageError with the nearest name."""
        table, name = registry("commands"), args[0]
        if name not in table:
            if name.startswith("-"):
                return super().resolve_command(ctx, args)
            raise UsageError(f"no command is called {name!r}", why=did_you_mean(name, table),
                             next="quantkit --help")
        return name, with_debug(table.get(name)), args[1:]

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None,
             complete_var: str | None = None, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run and exit with a code of :mod:`quantkit.support.errors`; without ``standalone_mode``, raise."""
        run = super().main
        if not standalone_mode:
            return run(args, prog_name, complete_var, standalone_mode=False, **extra)
        return guarded(lambda: run(args, "quantkit", complete_var,
                                   standalone_mode=False, **extra))


def guarded(run: Callable[[], Any]) -> NoReturn:
    """Call ``run`` and leave the process: done, or with the error in words on stderr."""
    global _debug
    _debug = False
    # By default torch's threads spin for a millisecond at every barrier: with other work on the cores that
    # costs a factor of twenty. This long is enough to bridge two operations, and as fast on idle cores;
    # not to spin at all halves decode there. Large tensors in huge pages spare a run tens of millions of page
    # faults. Both are read when torch is imported, and by the processes started here.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with one_line_warnings(), announced_compiling():
        try:
            code = run()
            sys.stdout.flush()
        except BaseException as error:  # also SystemExit, KeyboardInterrupt and click's own
            code = _failed(error)
    sys.exit(code if type(code) is int else 0)


def _failed(error: BaseException) -> int:
    """Say what went wrong on stderr; the exit code."""
    if isinstance(error, SystemExit):
        if (ended := plugin_failure(error)) is not None:  # code of a stranger's that ends the process
            show_error(ended.what, ended.why, ended.next)
            return ended.exit_code
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, BrokenPipeError):
        _close_pipe()
        return FAILED
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        show_error("interrupted")
        return INTERRUPTED
    if debugging():
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        return _misused(error)
    failure = error if isinstance(error, QuantkitError | MemoryError) else plugin_failure(error) or error
    if isinstance(failure, QuantkitError):
        show_error(failure.what, failure.why, failure.next)
        return failure.exit_code
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        show_error(f"{where}{error.strerror}", next=_OS_REMEDIES.get(type(error)) or _remedy(error.errno))
    elif isinstance(error, MemoryError):
        show_error("out of memory", next="quantkit quantize SOURCE --recipe int8 --out OUT --dry-run "
                                         "shows what a run needs")
    else:
        first = str(error).strip().splitlines()[:1]
        show_error(f"internal error: {': '.join([type(error).__name__, *first])}", why=_suspects(),
                   next="run the same command again with --debug and report what it prints")
    return FAILED


def _suspects() -> str | None:
    """Which plugins may have given quantkit what it couldn't use, though no code of theirs failed."""
    try:
        names = [info.name for info in current().plugins if info.distribution != BUILTIN and not info.error]
    except Exception:
        return None
    if not names:
        return None
    return (f"it may be quantkit's, or that of a plugin ({', '.join(names)}) that gave it what it can't use: "
            f"quantkit plugins check {names[0]}")


_OS_REMEDIES: dict[type[OSError], str] = {
    PermissionError: "check who owns it, or name another path",
    FileNotFoundError: "check the path",
    IsADirectoryError: "name a file, not a folder",
    NotADirectoryError: "name a folder, not a file",
}


def _remedy(number: int) -> str | None:
    import errno

    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space, then run the same command again: finished layers are kept"
    return "use a folder that can be written" if number == errno.EROFS else None


def _misused(error: click.ClickException) -> int:
    """A wrong option or argument, in the same words as every other error."""
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx else "quantkit"
    if type(error).__name__ == "NoArgsIsHelpError":
        click.echo(error.format_message(), err=True)
        return error.exit_code
    what, why = error.format_message().rstrip("."), None
    if isinstance(error, click.NoSuchOption) and ctx:
        # click's own message has its guesses in it
        what = f"no such option: {error.option_name}"
        why = did_you_mean(error.option_name, {o for p in ctx.command.get_params(ctx) for o in p.opts})
    elif ctx and isinstance(ctx.command, click.Group) and (hit := re.match("No such command '(.*?)'", what)):
        what, why = hit[0], did_you_mean(hit[1], ctx.command.list_commands(ctx))
    show_error(what, why, f"{path} --help")
    return error.exit_code


def _close_pipe() -> None:
    """Whoever read our output has gone: nothing is left to say, not even at interpreter exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Warnings (a broken plugin, say) become one line on stderr, without file and source line, each once."""
    seen = set[str]()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            show_warning(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def announced_compiling() -> Iterator[None]:
    """Kernels that must be compiled first are no silent wait."""
    notices: list[Listener] = []

    def tell(event: ProgressEvent) -> None:
        if not notices:  # imported when there is something to say
            from quantkit.api.progress import CompileNotice

            notices.append(CompileNotice())
        notices[0](event)

    compiling.append(tell)
    try:
        yield
    finally:
        compiling.remove(tell)


_debug = False


def debugging() -> bool:
    """Whether tracebacks are wanted: ``--debug``, or ``QUANTKIT_DEBUG`` set to anything but 0."""
    return _debug or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    global _debug
    _debug = _debug or value


def _debug_option() -> click.Option:
    return click.Option(["--debug"], is_flag=True, is_eager=True, expose_value=False, hidden=True,
                        callback=_set_debug, help="Show a traceback when something fails.")


def with_debug(command: click.Command) -> click.Command:
    """Let a command, and those below it, take ``--debug`` too, wherever it is written."""
    if not any("--debug" in parameter.opts for parameter in command.params):
        command.params.append(_debug_option())
    for child in getattr(command, "commands", {}).values():
        with_debug(child)
    return command


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantkit", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, is_eager=True, expose_value=False, callback=_set_debug,
              help="Show a traceback when something fails (also after a command; or QUANTKIT_DEBUG=1).")
def main() -> None:
    """Make an open-weights language model smaller and faster, and measure what it cost.

    Start with `quantkit demo`, or with `quantkit quantize smollm2 --recipe int4 --out OUT`.
    """


if __name__ == "__main__":
    main()
