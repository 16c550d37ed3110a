"""The panels in which long ``--help`` pages show their options; what no panel names is in the last one."""

from __future__ import annotations

from rich_click.utils import OptionGroupDict

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
"""Command → panel → options."""


def option_groups() -> dict[str, list[OptionGroupDict]]:
    """The same as rich-click takes it."""
    return {f"quantkit {command}": [{"name": name, "options": [*options]} for name, options in panels.items()]
            for command, panels in PANELS.items()}
