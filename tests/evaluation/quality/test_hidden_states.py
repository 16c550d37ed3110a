"""What a model leaves of a text gives the logits of the model itself, without its layers."""

from __future__ import annotations

import errno
import gc
import weakref

import pytest
import torch

from quantkit.evaluation.quality import hidden_states
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.hidden_states import HiddenStates
from quantkit.evaluation.quality.score import compare, score
from quantkit.kv.spec import parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError
from quantkit.testing import tiny_model

TOKENS = torch.randint(4, 300, (2, 40), generator=torch.Generator().manual_seed(1))
FAMILIES = {"llama": {}, "gemma2": {}, "qwen2": {"tie_word_embeddings": False}, "qwen3_moe": {}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_model(tmp_path, family, dtype):
    loaded = load(str(tiny_model(tmp_path / "m", family, **FAMILIES[family])), dtype=dtype)
    states = HiddenStates(loaded, TOKENS)
    with torch.inference_mode():
        for number, window in enumerate(TOKENS):
            logits = loaded.model(window[None])[0, :-1]
            for part in (slice(0, 1), slice(3, 20), slice(20, 90), slice(None)):
                assert torch.equal(states.window(number)[part], logits[part])


def test_a_quantized_head(tmp_path, tiny):
    quantize(str(tiny), "int8", tmp_path / "head8")
    loaded = load(str(tmp_path / "head8"))
    states = HiddenStates(loaded, TOKENS)
    with torch.inference_mode():
        assert torch.equal(states.window(1)[:], loaded.model(TOKENS[1:])[0, :-1])
    assert states.runner.weight_bytes == loaded.model.weight_bytes


def test_the_layers_are_let_go_of(tiny):
    loaded = load(str(tiny))
    states = HiddenStates(loaded, TOKENS)
    layers = weakref.ref(loaded.model._model.layers[0])
    before = states.window(0)[:]
    del loaded
    gc.collect()
    assert layers() is None and torch.equal(states.window(0)[:], before)


@pytest.mark.parametrize("kv", [None, "int8", "window(24, sinks=3)"])
def test_scores_are_those_of_two_models_in_memory(tiny, int4, kv):
    first, second = load(str(tiny)), load(str(int4))
    prompt, runners = 0, [first, second]
    if kv is not None:
        prompt, runners = 20, [TeacherForcedModel(model, parse_kv(kv), 20) for model in (first, second)]
    states = HiddenStates(runners[0], TOKENS, prompt)
    scores, _ = score([runners[1]], TOKENS, prompt=prompt, reference=states)
    assert scores.summaries() == compare(runners, TOKENS, prompt=prompt)[1:]
    both, _ = score([states, runners[1]], TOKENS, prompt=prompt, reference=states)
    assert both.summaries()[0]["kl_mean"].value == 0
    if kv is not None:
        assert states.runner.kv_bytes == runners[0].kv_bytes > 0 and states.runner.kv == parse_kv(kv)


def test_the_file_has_no_name(tiny, tmp_path):
    states = HiddenStates(load(str(tiny)), TOKENS, folder=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert states.window(1)[:].shape == states.window(1).shape == (39, 300)


def test_a_full_disk(tiny, tmp_path, monkeypatch):
    class Full:
        def close(self):
            pass

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hidden_states.tempfile, "TemporaryFile", lambda dir: Full())
    with pytest.raises(QuantkitError, match="can't be kept in") as caught:
        HiddenStates(load(str(tiny)), TOKENS, folder=tmp_path)
    assert caught.value.why == "No space left on device" and "QUANTKIT_CACHE=DIR" in caught.value.next
