"""Nothing that quantkit reads is ever run: no pickle, no eval, no shell; checked in the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code",
           "runpy", "yaml", "pty"}
BARE_CALLS = {"eval", "exec", "compile", "__import__", "execfile", "breakpoint"}
DOTTED_CALLS = {"torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter",
                "yaml.load", "yaml.unsafe_load", "numpy.fromfile", "os.system", "os.popen", "os.execv",
                "subprocess.getoutput", "subprocess.getstatusoutput", "builtins.eval", "builtins.exec"}
ALIASES = {"np": "numpy"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return ALIASES.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    yield node.lineno, f"imports {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in MODULES:
                yield node.lineno, f"imports {node.module}"
            for alias in node.names:
                if f"{node.module}.{alias.name}" in DOTTED_CALLS:
                    yield node.lineno, f"imports {node.module}.{alias.name}"
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BARE_CALLS or name in DOTTED_CALLS:
                yield node.lineno, f"calls {name}"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg == "shell" and value is not False:
                    yield node.lineno, f"calls {name} with shell="
                if keyword.arg == "allow_pickle" and value is not False:
                    yield node.lineno, f"calls {name} with allow_pickle="
                if keyword.arg == "trust_remote_code":
                    yield node.lineno, f"calls {name} with trust_remote_code="
            if name == "numpy.load" and not any(k.arg == "allow_pickle" for k in node.keywords):
                yield node.lineno, "calls numpy.load without allow_pickle=False"


def source_files() -> list[Path]:
    return [path for folder in ("quantkit", "kernels", "plugins")
            for path in sorted((ROOT / folder).rglob("*.py"))
            if "tests" not in path.relative_to(ROOT).parts]


def test_no_file_runs_what_it_reads():
    files = source_files()
    assert len(files) > 30
    found = [f"{path.relative_to(ROOT)}:{line} {what}" for path in files
             for line, what in faults(ast.parse(path.read_text(encoding="utf-8"), str(path)))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("code", [
    "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "from torch import load",
    "eval('1')", "exec('1')", "__import__('os')", "import yaml\nyaml.load('')", "import marshal",
    "import shelve", "import subprocess\nsubprocess.run('ls', shell=True)",
    "import subprocess\nsubprocess.run('ls', shell=flag)",
    "import numpy as np\nnp.load('x')", "import numpy as np\nnp.load('x', allow_pickle=True)",
    "AutoModel.from_pretrained(x, trust_remote_code=True)", "import os\nos.system('ls')",
])
def test_the_check_sees_each_of_them(code):
    assert list(faults(ast.parse(code)))


@pytest.mark.parametrize("code", [
    "import subprocess\nsubprocess.run(['ls'])", "import re\nre.compile('x')", "model.eval()",
    "import numpy as np\nnp.load('x', allow_pickle=False)", "from safetensors.torch import load",
])
def test_the_check_leaves_the_harmless_alone(code):
    assert not list(faults(ast.parse(code)))
