"""Drafts on a GPU: several tokens of a sequence decode at once, and are those that come one by one."""

import dataclasses
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from quantkit.quantization.run import quantize
from quantkit.runtime import kv_manager, speculation
from quantkit.runtime.drafting.base import Drafter, DraftSource, parse_drafter
from quantkit.runtime.drafting.draft_model import LowBitDrafter, ModelDrafter
from quantkit.runtime.drafting.eagle3 import Eagle3Drafter
from quantkit.runtime.drafting.mtp import MtpDrafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.gpu import tables
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.runner import PipelinedDecoder
from quantkit.runtime.sampler import Sampling
from tests.helpers.draft_heads import eagle3_files, mtp_shapes, random_tensors
from tests.helpers.drafts import run, scripted

GREEDY = Sampling(max_tokens=9, ignore_eos=True)
CHANCE = dataclasses.replace(GREEDY, temperature=20.0, top_p=0.9, seed=5)
PENALTIES = dataclasses.replace(CHANCE, repetition_penalty=1.3, presence_penalty=0.5)
PROMPTS = [[5, 6, 7], [*range(5, 75)], [*range(9, 40)]]


@pytest.fixture
def drafted(monkeypatch):
    """Drafts are made whether they pay or not, at every step."""
    monkeypatch.setattr(speculation, "best_length", lambda acceptance, times, others, limit: min(limit, 4))
    monkeypatch.setattr(speculation, "STEPS_AHEAD", 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["none", "int8", "int4(residual_length=0)", "int8(residual_length=64)",
                                "rotation(4)", "window(20)+int4", "h2o(24, interval=7)+int4"])
def test_a_draft_changes_no_bit(loaded, drafted, kv):
    samplings = [GREEDY, CHANCE, PENALTIES]
    plain, _ = run(loaded, PROMPTS, samplings, kv)
    for wrong in (0.0, 0.4):
        results, counts = run(loaded, PROMPTS, samplings, kv, scripted(PROMPTS, plain, wrong=wrong))
        assert results == plain and counts.accepted > 4 and (counts.accepted == counts.tokens) == (wrong == 0)


def test_no_more_is_drafted_than_a_step_has_rows(loaded, drafted, monkeypatch):
    plain, _ = run(loaded, PROMPTS, [GREEDY] * 3, "int8")
    monkeypatch.setattr(GpuModel, "decode_rows", 4)
    results, counts = run(loaded, PROMPTS, [GREEDY] * 3, "int8", scripted(PROMPTS, plain, wrong=0.2))
    assert results == plain and counts.accepted > 2 and counts.tokens == counts.drafts  # one row is left


def test_a_step_is_given_ahead_while_nothing_is_drafted(loaded, monkeypatch):
    monkeypatch.setattr(speculation, "best_length", lambda acceptance, times, others, limit: limit)
    (plain,), _ = run(loaded, [PROMPTS[0]], [GREEDY], "none")
    ahead, decode = [], PipelinedDecoder.decode
    monkeypatch.setattr(PipelinedDecoder, "decode", lambda self, requests, all_fit: (
        ahead.append(self.pending), decode(self, requests, all_fit))[1])
    engine = Engine(loaded, drafter=parse_drafter("ngram(min_match=8)"))  # nothing comes twice
    request = engine.submit(PROMPTS[0], GREEDY)
    while engine.step():
        pass
    assert request.result.token_ids == [token.id for token in plain]
    assert sum(ahead) >= len(plain) // 2 and engine.speculator.times.base_s > 0
    assert engine.cache.used_bytes == 0


@pytest.mark.parametrize("kind", [LowBitDrafter, ModelDrafter])
def test_a_checkpoint_drafts_in_the_models_own_cache_or_in_one_of_its_own(loaded, drafted, tmp_path, kind):
    quantize(loaded.uri, "int8", tmp_path / "int8")
    plain, _ = run(loaded, PROMPTS[:2], [GREEDY, CHANCE], "int8")
    drafter = kind(checkpoint=str(tmp_path / "int8"), least_chance=0, max_tokens=3)
    results, counts = run(loaded, PROMPTS[:2], [GREEDY, CHANCE], "int8", drafter)
    assert results == plain and counts.accepted > 3


def test_who_gave_up_its_pages_decodes_its_answer_anew_many_tokens_at_once(loaded, monkeypatch):
    """And begins with what it decoded itself, which nobody else does."""
    for module in (kv_manager, tables):
        monkeypatch.setattr(module, "LOOKAHEAD", 4)
    steps = []
    whole = GpuModel.step_logits

    def watched(self, batch, ids, counts, wanted):
        steps.append((set(batch.phases), [*counts]))
        return whole(self, batch, ids, counts, wanted)

    monkeypatch.setattr(GpuModel, "step_logits", watched)
    prompt, sampling = PROMPTS[1][:56], dataclasses.replace(CHANCE, max_tokens=20)
    (plain,), _ = run(loaded, [prompt], [sampling], "none")
    for prefix_cache in (0, None):
        engine, tokens = Engine(loaded, prefix_cache=prefix_cache, max_batch=2), []
        request = engine.submit(prompt, sampling, on_token=tokens.append)
        while len(tokens) < 16:
            engine.step()
        engine._give(engine._decoder.flush())
        engine._scheduler.preempt(request)
        steps.clear()
        while engine.step():
            pass
        again = [counts for phases, counts in steps if phases == {"decode"} and counts != [1]]
        assert again == [[16]] if prefix_cache == 0 else again == [[8]]
        other = engine.submit([*prompt, *request.result.token_ids], dataclasses.replace(GREEDY, max_tokens=1))
        while engine.step():
            pass
        assert other.result.cached_tokens == 0 and request.result.token_ids == [token.id for token in plain]


def test_tokens_of_a_sequence_that_decode_together_have_their_own_bits(loaded):
    from quantkit.kv.batch import Batch
    from quantkit.kv.cache import KVCache

    def logits(cuts):
        cache, parts = KVCache(loaded.config, loaded.kv, loaded.dtype, loaded.model.device), []
        number, start = cache.add(), 0
        for cut in cuts:
            batch = Batch(cache, [number], "decode")
            parts.append(loaded.model.forward([PROMPTS[1][start:start + cut]], batch, [cut]).clone())
            start += cut
        return torch.cat(parts)

    single = logits([1] * 12)
    assert torch.equal(single, logits([5, 1, 6])) and torch.equal(single, logits([12]))


class Listening(Drafter):
    """Drafts what is rarely right, and notes what it is told of."""

    name: ClassVar[str] = "listening"

    def start(self, target):
        return ListeningSource(target.config.num_layers)


class ListeningSource(DraftSource):
    def __init__(self, layers):
        self.layers, self.told = (0, layers), {}

    def observe(self, text, start, hidden):
        assert hidden.dtype == torch.float32
        self.told |= dict(enumerate(hidden.cpu(), start))

    def propose(self, texts, limits):
        return [[5, 6][:limit] if len(text.tokens) % 3 else [] for text, limit in zip(texts, limits)]


def test_hidden_states_are_handed_out_of_prompts_drafts_and_steps_that_run_ahead(loaded, drafted):
    engine = Engine(loaded, drafter=Listening())
    request = engine.submit(PROMPTS[1], GREEDY)
    while engine.step():
        pass
    told = engine.speculator._source.told
    tokens = torch.tensor([*PROMPTS[1], *request.result.token_ids[:-1]], device=loaded.model.device)
    assert sorted(told)[:len(tokens)] == [*range(len(tokens))]
    rows = torch.stack([told[place] for place in range(len(tokens))])
    assert torch.equal(rows[:, 0], loaded.model.embed(tokens).float().cpu())
    last = loaded.model.hidden(tokens[None])[0].float().cpu()
    assert torch.allclose(rows[:, 1], last, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_drafts_there(loaded, drafted, tmp_path, kind):
    config, files = loaded.config, tmp_path / "head"
    if kind == "eagle3":
        eagle3_files(files, config, vocab=300, eagle_aux_hidden_state_layer_ids=[0, 1, 1])
        drafter = Eagle3Drafter(checkpoint=str(files), least_chance=0)
    else:
        files.mkdir()
        norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        shapes = mtp_shapes(config, "mtp.layers.0", norms, "mtp.fc")
        save_file(random_tensors(shapes), files / "model.safetensors")
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(loaded.uri) / name, files)
        drafter = MtpDrafter(checkpoint=str(files), least_chance=0)
    plain, _ = run(loaded, PROMPTS[:2], [GREEDY, CHANCE], "int8")
    results, counts = run(loaded, PROMPTS[:2], [GREEDY, CHANCE], "int8", drafter)
    assert results == plain and counts.tokens > 10
