"""Long help pages show their options in panels."""

import pytest

from quantkit.cli.main import PANELS
from tests.helpers.options import OPTIONS, long_name

MANY = 16


@pytest.mark.parametrize("command", PANELS)
def test_panels_have_options_of_the_command_each_once(command):
    own = {long_name(option) for path, option in OPTIONS if path == command}
    shown = [name for names in PANELS[command].values() for name in names if name in own]
    assert len(set(shown)) == len(shown) and all(own & {*names} for names in PANELS[command].values())
    assert {*PANELS[command]} & {"Output"} and len(own) - len(shown) <= 4, own - {*shown}
    known = {long_name(option) for _, option in OPTIONS}
    assert {name for names in PANELS[command].values() for name in names} <= known


def test_every_long_page_has_panels():
    counts = {path: sum(other == path for other, _ in OPTIONS) for path, _ in OPTIONS}
    assert {path for path, count in counts.items() if count >= MANY} <= set(PANELS)


def test_the_page_shows_them(process):
    text = process("serve-local", "--help").stdout
    positions = [text.index(f"─ {title} ─") for title in PANELS["serve-local"]]
    assert positions == sorted(positions) and text.index("--port") < positions[1] < text.index("--kv-memory")
