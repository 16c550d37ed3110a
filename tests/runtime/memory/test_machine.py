"""Memory as Linux tells it, read from files of a made-up root."""

import pytest

from quantkit.runtime.memory import machine as memory


@pytest.fixture
def root(tmp_path, monkeypatch):
    """8 GB of which 6 GB are available, in no group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\n"
                                           "HugePages_Total: 0\n")
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    return tmp_path


def group(root, path, names, limit, used, inactive):
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {inactive}\n")


def test_the_systems_own(root):
    assert memory.system_memory() == {"total": 8_000_000 * 1024, "available": 6_000_000 * 1024}
    assert memory.available_memory() == 6_000_000 * 1024


@pytest.mark.parametrize(("line", "path", "names"), [
    ("0::/a/b", "sys/fs/cgroup/a/b", memory._V2),
    ("0::/a/b", "sys/fs/cgroup/a", memory._V2),
    ("0::/elsewhere", "sys/fs/cgroup", memory._V2),
    ("4:memory:/x", "sys/fs/cgroup/memory/x", memory._V1),
    ("4:memory:/x", "sys/fs/cgroup/memory", memory._V1)])
def test_a_groups_limit_counts(root, line, path, names):
    (root / "proc/self/cgroup").write_text(f"1:cpu:/y\n{line}\n")
    group(root, path, names, 10**9, 6 * 10**8, 10**8)
    assert memory.available_memory() == 5 * 10**8


def test_no_limit(root):
    (root / "proc/self/cgroup").write_text("0::/a\n")
    group(root, "sys/fs/cgroup/a", memory._V2, "max", 10**9, 0)
    assert memory.available_memory() == 6_000_000 * 1024


def test_a_group_over_its_limit(root):
    (root / "proc/self/cgroup").write_text("0::/a\n")
    group(root, "sys/fs/cgroup/a", memory._V2, 10**9, 2 * 10**9, 0)
    assert memory.available_memory() == 0


def test_another_system(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    assert memory.available_memory() is None and memory.system_memory() == {"total": None, "available": None}
