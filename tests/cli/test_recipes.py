"""``quantkit recipes``."""

import pytest

from quantkit.recipe import list_recipes


def test_list_names_every_recipe(cli):
    result = cli("recipes", "list")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert names == [info.name for info in list_recipes()] and "int4" in names
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_list_as_json(cli_json):
    assert {"name", "description", "owner", "path", "error"} == set(cli_json("recipes", "list")[0])


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
