"""``quantkit recipes``."""

import pytest

from quantkit.cli.recipes import START
from quantkit.quantization.recipe import list_recipes


def test_list_names_every_recipe(cli):
    result = cli("recipes", "list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "start here" and max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines[lines.index("") + 2:] if line and not line.startswith(" ")]
    assert sorted({*names} - {"next"}) == [info.name for info in list_recipes()] and "int4" in names
    assert {line.split()[0] for line in lines[1:lines.index("")]} == set(START) <= set(names)
    assert lines[-1].endswith("quantkit quantize SOURCE --recipe NAME --dry-run")


def test_list_says_size_needs_and_engines(cli_json):
    rows = cli_json("recipes", "list")
    assert {"name", "description", "owner", "path", "error", "facts"} == set(rows[0])
    facts = {row["name"]: row["facts"] for row in rows}
    assert facts["int4-sym"]["bits"] == pytest.approx(4.25, abs=0.01)
    assert facts["int4"]["bits"] == pytest.approx(4.97, abs=0.01)
    assert [facts[name]["calibration"] for name in ("int4", "int4-datafree", "int8")] == [
        "text", "random", "none"]
    assert facts["int4"]["engines"] == ["vllm", "sglang", "transformers", "mlx", "llama.cpp"]
    assert facts["int4-asym"]["engines"] == facts["int4"]["engines"]
    assert facts["mlx-4bit"]["engines"] == ["mlx"] and facts["gguf-q4_k_m"]["engines"] == ["llama.cpp"]
    assert facts["trellis3"]["engines"] == [] and 0 < facts["int8"]["kl"] < facts["int4-rtn"]["kl"]
    assert all(fact is not None for fact in facts.values())


@pytest.mark.parametrize("name", [info.name for info in list_recipes()])
def test_show_every_recipe(cli, cli_json, name):
    result = cli("recipes", "show", name)
    assert result.exit_code == 0 and f"--recipe {name} " in result.stdout
    assert cli_json("recipes", "show", name)["name"] == name


def test_show_a_file(cli, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rules:\n  - match: '*'\n    method: rtn\n    options: {clip_search: true}\n"
                    "    spec: {bits: 4, granularity: {strategy: group, size: 32}}\n", encoding="utf-8")
    shown = cli("recipes", "show", file).stdout
    assert "rtn, int4 g32 sym, format pack-quantized, clip_search True" in " ".join(shown.split())


def test_show_an_unknown_one(cli):
    result = cli("recipes", "show", "int9")
    assert result.exit_code == 2 and "did you mean" in result.stderr
