"""What texts of the tree tell a user to type, read from its source."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from quantkit.cli.options import read_kv
from quantkit.plugins.manager import registry
from quantkit.plugins.registry import FIRST_PARTY
from quantkit.quantization.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
PLUGIN_RECIPES = {*FIRST_PARTY["recipe"], "int4-clipped"}  # the tutorial's
HOLE = "HOLE"
"""Stands for what is only known when the message is made."""
_COMMAND = re.compile(r"(?<![\w./-])quantkit (?=[a-z-])([^\n`]*)")
_PROSE = {"again", "aren", "charge", "checkpoint", "doesn", "has", "is", "loads", "offers", "reads", "record",
          "run", "write", "writes"}
"""What a sentence goes on with whose subject is quantkit."""
_EXAMPLES = {"sizes"}
"""Commands of plugins that pages are about."""
_END = re.compile(r"[;:,.]$|^(\||#|>|&&|or|and|…)$")


def messages() -> Iterator[tuple[str, str]]:
    """``file:line`` and text of every string in the product's code that isn't a docstring."""
    for folder in ("quantkit", "kernels/quantkit_kernels", "plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "tests" in path.relative_to(ROOT).parts:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node, text in _strings(tree):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def pages() -> Iterator[tuple[str, str]]:
    """``file:line`` and text of all code in the documentation: between backticks, fenced or indented."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
                 *sorted((ROOT / "plugins").glob("*/README.md"))]:
        text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            for code in [line] if line.startswith("    ") else re.findall(r"`([^`]+)`", line):
                yield where, code


def commands(text: str) -> Iterator[list[str]]:
    """Words of each ``quantkit …`` in a text, of what follows it too: prose isn't told from arguments."""
    for match in _COMMAND.finditer(text):
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError:  # a quote of the sentence around it
            words = match[1].replace('"', " ").replace("'", " ").split()
        for number, word in enumerate(words):
            if _END.search(word):
                words = [*words[:number], *([word[:-1]] if len(word) > 1 else [])]
                break
        yield words


def fault(words: list[str]) -> str | None:
    """Why a command isn't one: its name, an option, or an option's value; ``None``: it is one."""
    if not words or words[0] in ("--help", "--version", HOLE) or words[0].startswith(HOLE):
        return None
    if words[0] in _PROSE | _EXAMPLES:
        return None
    if words[0] not in registry("commands"):
        return f"no command {words[0]}"
    command: click.Command = registry("commands").get(words[0])
    rest = words[1:]
    if isinstance(command, click.Group):
        if not rest or rest[0].startswith("-") or rest[0] not in command.commands:
            return None if not rest or rest[0] in ("--help", HOLE) else f"no command {words[0]} {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name: option for option in command.params if isinstance(option, click.Option)
               for name in (*option.opts, *option.secondary_opts)}
    rest = [*rest]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not re.fullmatch(r"--?[a-z][a-z-]*", name) or name in ("--help", "--debug", "-h"):
            continue
        if (option := options.get(name)) is None:
            return f"{' '.join(words[:2])}: no option {name}"
        if option.is_flag:
            continue
        if not equals and not rest:  # the option itself is spoken of
            return None
        value = value if equals else rest.pop(0)
        if HOLE in value or "$" in value or not re.search(r"[a-z0-9]", value):  # known later, or OUT
            continue
        try:
            option.type.convert(value, option, None)
            if "--kv" in option.opts:
                read_kv([value])
            if "--recipe" in option.opts:
                for recipe in value.split(","):
                    if not recipe.endswith(".yaml") and recipe not in PLUGIN_RECIPES | {"none"}:
                        load_recipe(recipe)
        except Exception as error:
            if "it belongs to the plugin" in str(error):
                continue
            return f"{name} {value}: {error}"
    return None


def _strings(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    docs = {id(node.body[0].value) for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body and isinstance(node.body[0], ast.Expr)}
    docs |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # of attributes
    inside: set[int] = set()
    for node in ast.walk(tree):  # outer nodes come before inner ones
        if id(node) in inside or id(node) in docs:
            continue
        if _is_text(node):
            inside |= {id(inner) for inner in ast.walk(node)}
            yield from ((node, text) for text in texts(node))


def _is_text(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _is_text(left) or _is_text(right)
    return False


def texts(node: ast.expr) -> list[str]:
    """Every text that an expression can be; :data:`HOLE` where it can be anything."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return _joined([texts(part) for part in parts])
        case ast.FormattedValue(value=value):
            return texts(value) if isinstance(value, ast.IfExp | ast.Constant) else [HOLE]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined([texts(left), texts(right)])
        case ast.IfExp(body=body, orelse=other):
            return texts(body) + texts(other)
    return [HOLE]


def _joined(parts: list[list[str]]) -> list[str]:
    made = [""]
    for part in parts:
        made = [before + text for before in made for text in part][:64]
    return made
