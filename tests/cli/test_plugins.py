"""``quantkit plugins list``."""

import pytest

from quantkit.plugins import PluginInfo, current


def test_list_names_everything_registered(cli):
    result = cli("plugins", "list")
    assert result.exit_code == 0
    for table in current().registries.values():
        for name in table:
            assert name in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_has_owner_and_target(cli_json):
    facts = cli_json("plugins", "list")
    methods = {entry["name"]: entry for entry in facts["registered"]["methods"]}
    assert methods["rtn"]["target"] == "quantkit.methods.rtn:METHOD"
    assert methods["rtn"]["owner"] == "quantkit"
    assert set(facts["registered"]) == set(current().registries)


@pytest.mark.parametrize("arguments", [["plugins", "list"], ["doctor"]])
def test_a_broken_plugin_is_shown_with_its_error(cli, monkeypatch, arguments):
    broken = PluginInfo("bad", "dist-bad", "1.0", "ImportError: no left_pad")
    monkeypatch.setattr(current(), "plugins", [*current().plugins, broken])
    shown = cli(*arguments).stdout
    assert "dist-bad" in shown and "ImportError: no left_pad" in shown
