"""``quantkit doctor``."""

from quantkit.cli import doctor


def test_text(cli):
    result = cli("doctor")
    assert result.exit_code == 0, result.stderr
    for word in ("torch", "cpu", "memory", "gpu", "triton", "kernels", "plugins", "optional", "transformers"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


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
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "transformers" else real(name))
    line = next(line for line in cli("doctor").stdout.splitlines() if line.startswith("  transformers"))
    assert "absent" in line and "pip install" in line


def test_a_machine_without_proc(monkeypatch):
    monkeypatch.setattr(doctor, "_cpuinfo", dict)
    assert doctor._cpu_flags() == [] and doctor._cpu_name()
