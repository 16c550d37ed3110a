"""``quantkit plugins new``."""

from quantkit.testing.scaffold.kinds import KINDS


def test_it_says_what_it_made_and_what_to_type_next(cli, tmp_path):
    result = cli("plugins", "new", "mine", "--kind", "method", "--out", tmp_path / "deep" / "er")
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "deep" / "er" / "quantkit-mine"
    listed = [line.strip() for line in result.stdout.splitlines() if line.startswith("  ")]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert listed[:len(files)] == files
    assert listed[len(files):] == [f"cd {folder}", 'pip install -e ".[test]"', "pytest",
                                   "quantkit quantize smollm2 --recipe int4-mine --out OUT "
                                   "&& quantkit eval smollm2 OUT --windows 4"]
    for command in listed[len(files) + 1:]:
        assert f"    {command}\n" in (folder / "README.md").read_text(encoding="utf-8")


def test_json(cli_json, tmp_path):
    facts = cli_json("plugins", "new", "my-metric", "--kind", "metric", "--out", tmp_path)
    assert (facts["name"], facts["distribution"]) == ("my_metric", "quantkit-my-metric")
    assert facts["folder"] == str(tmp_path / "quantkit-my-metric")
    assert "src/quantkit_my_metric/metric.py" in facts["files"] and len(facts["next"]) == 4


def test_errors_exit_with_2_and_say_what_to_do(cli, tmp_path):
    for arguments in (["gptq", "--kind", "method"], ["No Name", "--kind", "method"], ["mine", "--kind", "x"],
                      ["mine"]):
        result = cli("plugins", "new", *arguments, "--out", tmp_path)
        assert result.exit_code == 2 and "next: " in result.stderr, result.stderr
    assert not any(tmp_path.iterdir())


def test_help_names_every_kind(cli):
    text = cli("plugins", "new", "--help").output
    assert all(kind in text for kind in KINDS)


def test_making_one_needs_no_torch(process, tmp_path):
    done = process("plugins", "new", "mine", "--kind", "kernel", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "quantkit-mine" / "pyproject.toml").is_file(), done.stderr
