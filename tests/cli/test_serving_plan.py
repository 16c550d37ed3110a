"""What serve-local says of memory before it loads, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from quantkit.checkpoint.open import open_model
from quantkit.cli.serve.memory import MemoryForecast
from quantkit.runtime.memory import machine
from quantkit.support.errors import QuantkitError


@pytest.fixture
def said(tiny, checkpoint, capsys, monkeypatch):
    """``said(available, …)``: stderr of the plan for 80 columns, for one folder or several."""
    monkeypatch.setenv("COLUMNS", "80")

    def plan(available, *folders, **options):
        folders, left = folders or (tiny,), iter([available])  # asked for once, before any is loaded
        monkeypatch.setattr(machine, "available_memory", lambda: next(left))
        made = MemoryForecast(len(folders), **options)
        for folder in folders:
            source = open_model(str(folder))
            try:
                made.add(str(folder), source, torch.device("cpu"))
            finally:
                source.close()
        return capsys.readouterr().err

    return plan


def test_lines(said):
    text = said(10**12)
    assert text.startswith("memory: weights ") and "runtime " in text and "warning" not in text
    assert all(len(line) <= 80 for line in text.splitlines()) and len(text.splitlines()) <= 3
    joined = " ".join(text.split())
    assert "KV cache up to " in joined and "--max-batch 8" in joined and "1.0 TB available" in joined
    assert "available" not in said(None)


def test_a_fixed_cache_and_other_parts(said):
    joined = " ".join(said(10**12, kv_memory=10**5).split())
    assert "KV cache 100 kB (--kv-memory; " in joined and "prefix" not in joined, "it takes free pages"
    assert "prefix cache 200 MB, " in " ".join(said(10**12, prefix_cache=2 * 10**8).split())
    assert "prefix" not in said(10**12, prefix_cache=0) and "prefix cache " in said(10**12)


def test_too_much_in_all_is_a_warning(said):
    text = said(6 * 10**8, max_batch=4096, prefix_cache=0)
    assert "warning: the server may need " in text and "600 MB are available" in text
    assert "--kv-memory " in text and "full length fit" in text
    assert "give less to --kv-memory" in said(5 * 10**8, kv_memory=10**9, max_batch=4096)


def test_two_models(said, tiny, checkpoint):
    alone = said(10**12, tiny)
    both = said(10**12, tiny, checkpoint)
    assert both.startswith(alone) and "models" not in alone
    joined = " ".join(both.split())
    assert joined.count("memory: ") == 3 and "memory: 2 models; at most " in joined
    assert joined.count("of 1.0 TB available") == 2 and "GB available beside the models before it" in joined
    assert "warning" not in both


def test_two_models_that_fit_only_alone(said, tiny, checkpoint):
    options = {"max_batch": 2048, "prefix_cache": 0}
    assert "warning" not in said(12 * 10**8, tiny, **options)
    assert "warning" not in said(12 * 10**8, checkpoint, **options)
    joined = " ".join(said(12 * 10**8, tiny, checkpoint, **options).split())
    assert joined.count("warning: the server may need ") == 1 and "and 1.2 GB are available" in joined
    assert "MB bounds the KV cache of each model, --max-batch" in joined
    assert "warning: " in said(6 * 10**8, tiny, checkpoint, **options), "caches grow, so they may be loaded"
    with pytest.raises(QuantkitError, match=r"the weights of .* don't fit") as refused:
        said(6 * 10**8, tiny, checkpoint, kv_memory=10**9, **options)
    assert "beside the models before it, which take " in refused.value.why
    assert refused.value.next.startswith("--kv-memory bounds what each model's")


def test_weights_that_do_not_fit_are_refused(said, tiny, checkpoint):
    with pytest.raises(QuantkitError, match=r"the weights of .* don't fit into the memory") as refused:
        said(10_000)
    assert "10 kB are available" in refused.value.why
    assert f"quantkit plan {tiny}" in refused.value.next and "--overcommit" in refused.value.next
    with pytest.raises(QuantkitError) as refused:
        said(10_000, checkpoint)
    assert "of the original" in refused.value.next
    assert "warning: " in said(10_000, overcommit=True)


def test_the_command_refuses_before_it_loads(cli, tiny, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 10_000)
    monkeypatch.setattr("quantkit.runtime.loader.build_model", lambda *_: pytest.fail("it was loaded"))
    result = cli("serve-local", tiny, "--port", "0")
    assert result.exit_code == 1 and "don't fit into the memory" in result.stderr
