"""Broken plugins that the plugin manager and the registries must catch, each a distribution that can be
installed into a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HEAD = "from quantkit.plugins.hooks import hookimpl\n\n\n"
LOADING = ("--help", "plugins list", "doctor", "generate", "quantize", "inspect")
"""Commands that say it if a plugin can't be loaded: all."""


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that breaks a rule.

    Attributes:
        name: the name of its entry point; its module is ``broken_<name>``, its distribution
            ``broken-<name>``.
        broken: what is wrong with it.
        caught: what catches it.
        code: the code of its module.
        says: a part of the warning; nothing is said until it is asked for if this is empty.
        when: the commands that warn.
        modules: further modules of the distribution.
        value: the value of the entry point, if it isn't the module.
    """

    name: str
    broken: str
    caught: str
    code: str
    says: str = ""
    when: tuple[str, ...] = LOADING
    modules: dict[str, str] = field(default_factory=dict)
    value: str = ""

    @property
    def distribution(self) -> str:
        """As warnings name it."""
        return f"broken-{self.name}"

    def install(self, site: Path) -> None:
        """Write modules and ``*.dist-info``, as an installer would, into a folder of ``sys.path``."""
        info = site / f"broken_{self.name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: 1.0\n",
                                       encoding="utf-8")
        (info / "entry_points.txt").write_text(
            f"[quantkit]\n{self.name} = {self.value or f'broken_{self.name}'}\n", encoding="utf-8")
        for module, code in {f"broken_{self.name}": self.code, **self.modules}.items():
            (site / f"{module}.py").write_text(code, encoding="utf-8")


def hook(name: str, *body: str) -> str:
    """A module with one register hook."""
    lines = "".join(f"    {line}\n" for line in body)
    return f"{HEAD}@hookimpl\ndef {name}(register):\n{lines}"


def registering(kind: str, name: str, target: str) -> str:
    """A module that registers one thing."""
    return hook(f"register_{kind}", f"register({name!r}, {target})")


COMPLETE_KERNEL = """
class Kernel:
    name = "{name}"
    order = {order}
    def reason_against(self, query):
        {declines}
    def prepare(self, weight):
        raise AssertionError("never chosen")
    def run(self, x, prepared):
        raise AssertionError("never chosen")
KERNEL = Kernel()
"""
SOURCE = """
from quantkit.sources.base import SourceKind
def matches(uri):
    {matches}
def open(uri, revision):
    raise AssertionError("never asked")
KIND = SourceKind(matches, open, "{name}:NAME", {order})
"""
# generate runs a checkpoint here, which is found without asking what kind of source it is
CHOOSING = ("doctor", "generate")
OPENING = ("quantize", "inspect")
LISTING = ("plugins list", "doctor", "quantize")


def kernel(name: str, broken: str, says: str, *, order: str = "-5", declines: str = "return 'never'",
           code: str = "") -> BrokenPlugin:
    """A plugin whose kernel is broken."""
    text = code or COMPLETE_KERNEL.format(name=name, order=order, declines=declines)
    return BrokenPlugin(name, broken, "dispatch.choose, which takes it for one that declined",
                        registering("kernels", name, f"'broken_{name}_kernel:KERNEL'"), says, CHOOSING,
                        {f"broken_{name}_kernel": text})


def source(name: str, broken: str, says: str, *, order: str = "-5", matches: str = "return False",
           code: str = "") -> BrokenPlugin:
    """A plugin whose source is broken."""
    text = code or SOURCE.format(name=name, order=order, matches=matches)
    return BrokenPlugin(name, broken, "sources.open.kind_of, which passes over it",
                        registering("sources", name, f"'broken_{name}_source:KIND'"), says, OPENING,
                        {f"broken_{name}_source": text})


LOADER = "the plugin manager when it loads the entry point"
BROKEN: tuple[BrokenPlugin, ...] = (
    BrokenPlugin("taken", "a method with a built-in's name", "the registry: the name stays the built-in's",
                 registering("methods", "rtn", "'broken_taken:METHOD'"),
                 "method 'rtn' is registered twice, by quantkit and by broken-taken"),
    BrokenPlugin("first", "a method that another plugin has too", "the registry, when it is asked for",
                 registering("methods", "shared", "'broken_first:METHOD'")),
    BrokenPlugin("second", "the same method's name again", "the registry: the name is contested",
                 registering("methods", "shared", "'broken_second:METHOD'"),
                 "method 'shared' is registered twice, by broken-first and by broken-second"),
    BrokenPlugin("bothkinds", "a KV codec with a policy's name",
                 "the registry: --kv couldn't tell them apart",
                 registering("kv_codecs", "window", "'broken_bothkinds:Codec'"),
                 "as KV policy by quantkit and as KV codec by broken-bothkinds"),
    BrokenPlugin("twice", "the same name twice", "the registry: the name is contested",
                 hook("register_methods", "register('mine', 'a:B')", "register('mine', 'a:C')"),
                 "method 'mine' is registered twice, by broken-twice 1.0"),
    BrokenPlugin("nohook", "a function that isn't marked", LOADER,
                 "def register_methods(register):\n    register('unmarked', 'a:B')\n",
                 "marks no function with @hookimpl; register_methods must be marked"),
    BrokenPlugin("misspelled", "a hook that doesn't exist", LOADER, hook("register_method", "pass"),
                 "implements a hook 'register_method' that doesn't exist in quantkit; "
                 "did you mean 'register_methods'"),
    BrokenPlugin("signature", "a hook with an argument too many", LOADER,
                 f"{HEAD}@hookimpl\ndef register_methods(register, table):\n    pass\n", "'table'"),
    BrokenPlugin("hookraises", "a hook that raises", LOADER,
                 hook("register_methods", "register('half', 'a:B')", "raise RuntimeError('no licence')"),
                 "fails in its hook register_methods; RuntimeError: no licence"),
    BrokenPlugin("importraises", "an import that raises", LOADER, "raise RuntimeError('no GPU here')\n",
                 "RuntimeError: no GPU here"),
    BrokenPlugin("missingpackage", "an import of what isn't installed", LOADER,
                 "import no_such_package_at_all\n",
                 "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
    BrokenPlugin("exits", "an import that ends the process", LOADER, "import sys\n\nsys.exit(3)\n",
                 "SystemExit: 3"),
    BrokenPlugin("oldimport", "an import of a name that quantkit doesn't have", LOADER,
                 "from quantkit.plugins.hooks import no_such_marker\n",
                 "it may be for another quantkit: pip install --upgrade broken-oldimport"),
    BrokenPlugin("newer", "written for a later API", LOADER,
                 f"QUANTKIT_API = 99\n{registering('methods', 'm', '1')}",
                 "is for version 99 of the plugin API; this quantkit offers 1 to 1; run pip install . in a "
                 "newer checkout of quantkit"),
    BrokenPlugin("number", "an entry point that names a number", LOADER, "PLUGIN = 5\n",
                 "marks no function with @hookimpl", value="broken_number:PLUGIN"),
    BrokenPlugin("noattribute", "an entry point to nothing", LOADER, "", "has no attribute 'PLUGIN'",
                 value="broken_noattribute:PLUGIN"),
    BrokenPlugin("noname", "register() without a target", LOADER,
                 hook("register_methods", "register('alone')"),
                 "fails in its hook register_methods; TypeError"),
    BrokenPlugin("badname", "a name with a space and a plus", LOADER,
                 registering("methods", "my +method", "1"),
                 "can't have this name; recipes and command lines spell names [A-Za-z0-9]"),
    BrokenPlugin("numeric", "a name that YAML reads as a number", LOADER, registering("methods", "1e5", "1"),
                 "can't have this name"),
    BrokenPlugin("badtarget", "a target without a colon", LOADER, registering("methods", "m", "'a.b.c'"),
                 'a lazy target is written "module:attr"'),
    BrokenPlugin("recipesraise", "recipe_dirs() raises", "the manager where folders are walked",
                 f"{HEAD}@hookimpl\ndef recipe_dirs():\n    raise OSError('no folder')\n",
                 "recipe_dirs of plugin 'recipesraise' of broken-recipesraise 1.0 failed: OSError: no folder",
                 LISTING),
    BrokenPlugin("recipesjunk", "recipe_dirs() returns a text", "the manager where folders are walked",
                 f"{HEAD}@hookimpl\ndef recipe_dirs():\n    return '/tmp'\n",
                 "it returned a str, not a list of folders", LISTING),
    kernel("kerneltype", "a kernel of the wrong type",
           "is an int; it must be a quantkit.ops.dispatch.LinearKernel",
           code="KERNEL = 5\n"),
    kernel("kernelimport", "a kernel whose import raises", "RuntimeError: no compiler",
           code="raise RuntimeError('no compiler')\n"),
    kernel("kernelorder", "a kernel whose order is a text", "has order 'first', which isn't an int",
           order="'first'"),
    kernel("kernelraises", "reason_against() raises", "reason_against() failed: ValueError: what is this",
           declines="raise ValueError('what is this')"),
    source("matchesraises", "matches() raises", "matches() failed: KeyError", matches="raise KeyError(uri)"),
    source("sourcetype", "a source of the wrong type",
           "is a str; it must be a quantkit.sources.base.SourceKind",
           code="KIND = 'me'\n"),
    BrokenPlugin("archimport", "an architecture whose import fails", "Registry.get, for its own models only",
                 registering("architectures", "broken_family", "'broken_no_such_module:ARCHITECTURE'")),
    BrokenPlugin("metrictype", "a metric of the wrong type", "Registry.usable",
                 registering("metrics", "broken_metric", "'broken_metrictype:METRIC'") + "METRIC = len\n"),
    BrokenPlugin("policytype", "a KV policy of the wrong type", "Registry.get",
                 registering("kv_policies", "broken_policy", "'broken_policytype:Policy'")
                 + "class Policy:\n    budget = 4\n"),
    BrokenPlugin("codecabstract", "a KV codec that doesn't say how keys are stored", "Registry.get",
                 registering("kv_codecs", "broken_codec", "'broken_codecabstract_codec:Codec'"), modules={
                     "broken_codecabstract_codec": "from quantkit.kv.base import KVCodec\n\n\n"
                                                "class Codec(KVCodec):\n    name = 'broken_codec'\n"}),
    BrokenPlugin("reportertype", "a reporter that is a function", "Registry.get",
                 registering("reporters", "broken_reporter", "'broken_reportertype:render'")
                 + "def render(result):\n    return ''\n"),
    BrokenPlugin("commandtype", "a command that is a function", "Registry.get, when it is called",
                 hook("register_commands", "register('broken-command', 'broken_commandtype:run', help=5)")
                 + "def run():\n    pass\n"),
    BrokenPlugin("policyraises", "a KV policy that raises", "blame, which finds whose code raised",
                 registering("kv_policies", "broken_raises", "'broken_policyraises_policy:Raises'"), modules={
                     "broken_policyraises_policy":
                         "from typing import ClassVar\n\n"
                         "from quantkit.kv.policies.score_policy import ScorePolicy\n\n\n"
                         "class Raises(ScorePolicy):\n    name: ClassVar[str] = 'broken_raises'\n\n"
                         "    def score(self, view):\n        raise ZeroDivisionError('no scores')\n"}),
    BrokenPlugin("methodraises", "a method that raises", "blame, which finds whose code raised",
                 registering("methods", "broken_method", "'broken_methodraises_method:METHOD'"), modules={
                     "broken_methodraises_method":
                         "from quantkit.quantization.methods.base import Method\n\n\n"
                         "def quantize(weight, stats, spec, options):\n    return {}['absent']\n\n\n"
                         "METHOD = Method('broken_method', 'https://example.org', quantize)\n"}),
)
