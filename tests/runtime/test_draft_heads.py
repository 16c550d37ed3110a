"""EAGLE-3 and multi-token heads with random weights, beside the same maths written down by itself."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shutil
import warnings
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.kv.spec import parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime.drafting.base import Drafter, DraftSource
from quantkit.runtime.drafting.eagle3 import Eagle3Drafter
from quantkit.runtime.drafting.head import HeadSource
from quantkit.runtime.drafting.mtp import MtpDrafter
from quantkit.runtime.drafting.ngram import NgramDrafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import Scheduler
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model
from tests.helpers.draft_heads import eagle3_files, mtp_shapes, random_tensors

pytestmark = pytest.mark.usefixtures("short_chunks", "always_drafted")
HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, EPS, THETA = 64, 7, 4, 2, 16, 1e-6, 10000.0
ANSWER = Sampling(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("heads") / "model", "llama", dtype="float32", rms_norm_eps=EPS,
                      num_hidden_layers=LAYERS, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder), dtype="float32")


def norm(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def attend(x, weights, prefix):
    """Causal attention over ``x [T, …]``, float64, from position 0."""
    count = len(x)
    q, k, v = ((x @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T).view(count, -1, DIM).transpose(0, 1)
               for name in "qkv")
    angles = torch.arange(count)[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([part, part], -1).double() for part in (angles.cos(), angles.sin()))

    def turned(y):
        return y * cos + torch.cat([-y[..., DIM // 2:], y[..., :DIM // 2]], -1) * sin

    q, k, v = turned(q), *(y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (turned(k), v))
    scores = (q @ k.transpose(1, 2)) * DIM ** -0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return mixed @ weights[f"{prefix}.self_attn.o_proj.weight"].T


def mlp(x, weights, prefix):
    gate, up = (x @ weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T


def hidden_states(weights, ids):
    """The model in float64: what enters each layer, and what the last one leaves."""
    x = weights["model.embed_tokens.weight"][ids]
    states = [x]
    for index in range(LAYERS):
        prefix = f"model.layers.{index}"
        x = x + attend(norm(x, weights[f"{prefix}.input_layernorm.weight"]), weights, prefix)
        x = x + mlp(norm(x, weights[f"{prefix}.post_attention_layernorm.weight"]), weights, prefix)
        states.append(x)
    return states


class Eagle3:
    """A head's files, and its drafts by the paper's formulas."""

    def __init__(self, folder, config, weights, prefix, residual):
        self.weights, self.prefix, self.residual = weights, prefix, residual
        self.own, self.order = eagle3_files(folder, config, prefix, norm_before_residual=residual)
        self.drafter = Eagle3Drafter(checkpoint=str(folder), least_chance=0)
        self.layers = (2, LAYERS // 2, LAYERS - 3)

    def drafts(self, tokens, count):
        own, prefix = {name: tensor.double() for name, tensor in self.own.items()}, self.prefix
        states = hidden_states(self.weights, tokens[:-1])
        hidden = torch.cat([states[layer] for layer in self.layers], -1) @ own["fc.weight"].T
        ids, draft = list(tokens[1:]), []
        for _ in range(count):
            normed = norm(hidden, own[f"{prefix}.hidden_norm.weight"])
            embedded = self.weights["model.embed_tokens.weight"][ids]
            x = torch.cat([norm(embedded, own[f"{prefix}.input_layernorm.weight"]), normed], -1)
            y = (normed if self.residual else hidden) + attend(x, own, prefix)
            y = y + mlp(norm(y, own[f"{prefix}.post_attention_layernorm.weight"]), own, prefix)
            logits = norm(y[-1], own["norm.weight"]) @ own["lm_head.weight"].T
            ids.append(int(self.order[logits.argmax()]))
            draft.append(ids[-1])
            hidden = torch.cat([hidden, y[-1:]])
        return draft


class Mtp:
    """A head's files in one of the layouts, and its drafts."""

    def __init__(self, folder, config, weights, block, names, hidden_first, normed):
        self.weights, self.block, self.names, self.normed = weights, block, names, normed
        self.hidden_first = hidden_first
        token, hidden, projection, last = names
        self.own = random_tensors(mtp_shapes(config, block, (token, hidden, last), projection))
        folder.mkdir()
        everything = {name: tensor.float() for name, tensor in weights.items()} | self.own
        save_file({name: tensor.contiguous() for name, tensor in everything.items()},
                  folder / "model.safetensors")
        self.drafter = MtpDrafter(checkpoint=str(folder), least_chance=0)

    def drafts(self, tokens, count):
        own, (token, last_hidden, projection, last) = (
            {name: tensor.double() for name, tensor in self.own.items()}, self.names)
        hidden = norm(hidden_states(self.weights, tokens[:-1])[-1], self.weights["model.norm.weight"])
        ids, draft = list(tokens[1:]), []
        for _ in range(count):
            parts = [norm(self.weights["model.embed_tokens.weight"][ids], own[f"{token}.weight"]),
                     norm(hidden, own[f"{last_hidden}.weight"])]
            x = torch.cat(parts[::-1] if self.hidden_first else parts, -1) @ own[f"{projection}.weight"].T
            x = x + attend(norm(x, own[f"{self.block}.input_layernorm.weight"]), own, self.block)
            x = x + mlp(norm(x, own[f"{self.block}.post_attention_layernorm.weight"]), own, self.block)
            normed = norm(x[-1:], own[f"{last}.weight"])
            ids.append(int((normed[0] @ self.weights["lm_head.weight"].T).argmax()))
            draft.append(ids[-1])
            hidden = torch.cat([hidden, normed if self.normed else x[-1:]])
        return draft


@pytest.fixture(scope="module")
def weights(folder):
    return {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}


CASES = {
    "eagle3": lambda *model: Eagle3(*model, "midlayer", False),
    "eagle3 of speculators": lambda *model: Eagle3(*model, "layers.0", True),
    "mimo": lambda *model: Mtp(*model, "model.mtp_layers.0", [
        f"model.mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj",
                                                  "final_layernorm")], True, True),
    "deepseek": lambda *model: Mtp(*model, f"model.layers.{LAYERS}", [
        f"model.layers.{LAYERS}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")],
        False, False),
    "qwen": lambda *model: Mtp(*model, "mtp.layers.0", [
        f"mtp.{name}" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")],
        False, True)}


@pytest.fixture(scope="module", params=CASES)
def head(request, tmp_path_factory, folder, loaded, weights):
    made = CASES[request.param](tmp_path_factory.mktemp("head") / "files", loaded.config, weights)
    if isinstance(made, Mtp):
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / name, made.drafter.checkpoint)
    return made


def drafted(loaded, drafter, prompts, monkeypatch, sampling=ANSWER, **options):
    """Answers with drafts, and each draft with the text that it goes on from."""
    seen, propose = [], HeadSource.propose

    def spied(self, texts, limits):
        drafts = propose(self, texts, limits)
        seen.extend((list(text.tokens), list(draft), limit)
                    for text, draft, limit in zip(texts, drafts, limits))
        return drafts

    monkeypatch.setattr(HeadSource, "propose", spied)
    engine = Engine(loaded, drafter=drafter, **options)
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    while engine.step():
        pass
    engine.close()
    return [request.result.token_ids for request in requests], seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", ["none", "int8"])
def test_drafts_are_those_of_the_formulas(folder, head, prompt_of, monkeypatch, kv):
    loaded = load(str(folder), dtype="float32")
    prompts = [prompt_of(40), prompt_of(9, 1)]
    plain = [result.token_ids for result in generate(loaded, prompts, ANSWER, kv=parse_kv(kv))]
    answers, drafts = drafted(loaded, head.drafter, prompts, monkeypatch, kv=parse_kv(kv))
    assert answers == plain
    assert len(drafts) > 30 and all(len(draft) == limit for _, draft, limit in drafts)
    if kv == "none":
        for tokens, draft, limit in drafts[::3]:
            assert draft == head.drafts(tokens, limit)


@pytest.mark.sampled(2)
def test_texts_that_begin_in_the_prefix_cache(folder, head, prompt_of, monkeypatch):
    """What is missing to a head is what the model never computed for this text: it drafts on."""
    loaded = load(str(folder), dtype="float32")
    prompts = [[*prompt_of(70), *prompt_of(20, seed)] for seed in range(4)]
    plain = [result.token_ids for result in generate(loaded, prompts, ANSWER)]
    answers, drafts = drafted(loaded, head.drafter, prompts, monkeypatch, max_batch=2, prefix_cache=2**22)
    assert answers == plain
    assert sum(len(draft) > 0 for _, draft, _ in drafts) > 60


@pytest.mark.sampled(3)
def test_texts_that_give_up_their_pages(folder, head, prompt_of, monkeypatch):
    loaded = load(str(folder), dtype="float32")
    prompts, longer = [prompt_of(80, seed) for seed in range(4)], dataclasses.replace(ANSWER, max_tokens=220)
    plain = [result.token_ids for result in generate(loaded, prompts, longer)]
    preempted = []
    preempt = Scheduler.preempt
    monkeypatch.setattr(Scheduler, "preempt",
                        lambda self, request: (preempted.append(request.id), preempt(self, request)))
    answers, drafts = drafted(loaded, head.drafter, prompts, monkeypatch, longer, max_batch=4,
                              memory=2**20, context=320, prefix_cache=None)
    assert answers == plain and preempted
    assert sum(len(draft) > 0 for _, draft, _ in drafts) > 60


def test_a_model_that_had_a_head_serves_other_drafters(folder, head, prompt_of, monkeypatch):
    loaded = load(str(folder), dtype="float32")
    prompt = [*prompt_of(20), *prompt_of(20), *prompt_of(20)]
    drafted(loaded, head.drafter, [prompt], monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(loaded, drafter=NgramDrafter(min_match=1))
        request = engine.submit(prompt, ANSWER)
        while engine.step():
            pass
    assert request.result.drafted_tokens


class Listening(Drafter):
    """Notes what it is told of."""

    name: ClassVar[str] = "listening"

    def start(self, target):
        return ListeningSource()


class ListeningSource(DraftSource):
    layers = (0, LAYERS)

    def __init__(self):
        self.told = []

    def observe(self, text, start, hidden):
        self.told.append((start, len(hidden), tuple(hidden.shape[1:])))

    def propose(self, texts, limits):
        return [[5, 6][:limit] for limit in limits]


def test_any_drafter_is_told_of_the_layers_that_it_names(folder, prompt_of):
    loaded = load(str(folder), dtype="float32")
    engine = Engine(loaded, drafter=Listening())
    told = engine.speculator._source.told
    for sampling, more in ((ANSWER, {}), (dataclasses.replace(ANSWER, max_tokens=1), {}),
                           (ANSWER, {"pooling": "mean"})):
        told.clear()
        engine.submit(prompt_of(40), sampling, **more)
        while engine.step():
            pass
        assert bool(told) == (sampling.max_tokens > 1 and not more)  # no other has any use for it
        if told:
            assert told[0][0] == 0 and all(shape == (2, HIDDEN) for _, _, shape in told)
            assert {count for start, count, _ in told if start >= 40} == {1, 2, 3}


@pytest.mark.sampled(3)
def test_a_drafter_that_fails_keeps_nothing(folder, head, prompt_of, monkeypatch):
    loaded = load(str(folder), dtype="float32")
    engine = Engine(loaded, drafter=head.drafter)
    request = engine.submit(prompt_of(40), ANSWER)

    def fails(self, texts, limits):
        raise RuntimeError("no more")

    monkeypatch.setattr(HeadSource, "propose", fails)
    kept = weakref.ref(engine.speculator._source)
    with pytest.warns(UserWarning, match="no more"):
        while engine.step():
            pass
    gc.collect()
    assert len(request.result.token_ids) == 24 and kept() is None and engine.speculator.nbytes == 0


@pytest.mark.sampled(2)
def test_a_quantized_model_with_the_head_of_the_original(folder, head, prompt_of, tmp_path, monkeypatch):
    quantize(str(folder), "int8", tmp_path / "int8")
    loaded = load(str(tmp_path / "int8"), dtype="bfloat16")
    prompts = [prompt_of(40), prompt_of(9, 1)]
    chance = dataclasses.replace(ANSWER, temperature=0.8, seed=3)
    plain = [result.token_ids for result in generate(loaded, prompts, chance)]
    answers, drafts = drafted(loaded, head.drafter, prompts, monkeypatch, chance)
    assert answers == plain and len(drafts) > 20


def test_a_checkpoint_with_a_head_loads_without_it(folder, head, weights):
    if isinstance(head, Mtp):
        text = torch.tensor([[5, 6, 7, 8]])
        assert torch.equal(load(head.drafter.checkpoint, dtype="float32").model(text),
                           load(str(folder), dtype="float32").model(text))


# -- published files: what is read of them, and what is refused


@pytest.fixture
def drafter(loaded, tmp_path):
    """An EAGLE-3 head whose files a test changes."""
    eagle3_files(tmp_path / "files", loaded.config)
    return Eagle3Drafter(checkpoint=str(tmp_path / "files"))


def rewrite(drafter, **keys):
    """Change keys of its ``config.json``; ``None`` takes one out."""
    path = Path(drafter.checkpoint) / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return config


def test_where_published_configs_name_the_layers(drafter, loaded):
    """As in speculators' the inputs, as in SpecForge's the outputs."""
    name = "eagle_aux_hidden_state_layer_ids"
    config = rewrite(drafter)
    for keys in ({name: [1, 3, 5]}, {"eagle_config": {name: [0, 2, 4], "use_aux_hidden_state": True}}):
        rewrite(drafter, **{name: None, "eagle_config": None} | keys)
        assert drafter.start(loaded).layers == (1, 3, 5)
    layer = {key: config[key] for key in config if key not in ("draft_vocab_size", "norm_before_residual")}
    (Path(drafter.checkpoint) / "config.json").write_text(json.dumps({
        "architectures": ["Eagle3DraftModel"], "auto_map": {}, "draft_vocab_size": 100, "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": None, "embed_requires_grad": False,
        "has_no_defaults_at_init": False, "norm_before_fc": False, "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x/y"}},
        "speculators_model_type": "eagle3", "speculators_version": "0.3.0", "target_hidden_size": None,
        "tie_word_embeddings": False, "transformer_layer_config": layer}))
    assert drafter.start(loaded).layers == (2, 3, 4)


@pytest.mark.parametrize(("keys", "message"), [
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 40]}, "hidden states of the layers 2, 3, 40"),
    ({"eagle_aux_hidden_state_layer_ids": 3}, "must be a list of layers' numbers"),
    ({"eagle_aux_hidden_state_layer_ids": ["a", 2.7]}, "must be a list of layers' numbers"),
    ({"eagle_config": "x"}, "must be an object"), ({"transformer_layer_config": [1]}, "must be an object"),
    ({"draft_vocab_size": [1]}, "must be an integer"), ({"norm_before_residual": "no"}, "must be true or"),
    ({"norm_before_fc": True}, "only False is implemented"), ({"bias": True}, "only False is implemented"),
    ({"num_hidden_layers": 2}, "only heads of one layer"), ({"target_hidden_size": 128}, "only 64 is"),
    ({"mixer": "mamba"}, "no such key is implemented"),
    ({"draft_vocab_size": 90}, r"lm_head.weight has shape \[100, 64\]"),
    ({"hidden_size": 128}, "hidden size is 128, the model's 64")])
def test_configs_of_heads_are_read_strictly(drafter, loaded, keys, message):
    rewrite(drafter, **keys)
    with pytest.raises(QuantkitError) as refused:
        drafter.start(loaded)
    assert re.search(message, f"{refused.value.what}: {refused.value.why}")


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("fc.weight", torch.zeros(64, 192, dtype=torch.int64), "floating-point numbers of 2 dimensions"),
    ("fc.weight", torch.zeros(64), "floating-point numbers of 2 dimensions"),
    ("norm.weight", torch.zeros(64, 1), "floating-point numbers of 1 dimensions"),
    ("d2t", torch.zeros(100), "must be whole numbers"), ("d2t", torch.full((100,), 290), "it drafts token"),
    ("d2t", torch.full((100,), -5), "it drafts token -5"), ("fc.bias", torch.zeros(64), "that nothing uses"),
    ("midlayer.hidden_norm.weight", None, "lacks the tensor 'midlayer.hidden_norm.weight'")])
def test_tensors_of_heads_are_read_strictly(drafter, loaded, name, tensor, message):
    path = Path(drafter.checkpoint) / "model.safetensors"
    files = load_file(path)
    if tensor is None:
        del files[name]
    else:
        files[name] = tensor
    save_file(files, path)
    with pytest.raises(QuantkitError) as refused:
        drafter.start(loaded)
    assert message in f"{refused.value.what}: {refused.value.why}"


def test_what_holds_no_head_is_refused(folder, loaded, drafter, tmp_path):
    quantize(str(folder), "int8", tmp_path / "int8")
    for other, match in ((MtpDrafter(checkpoint=str(folder)), "has no head for further tokens"),
                           (MtpDrafter(checkpoint=str(tmp_path / "int8")), "holds no head"),
                           (Eagle3Drafter(checkpoint=str(tmp_path / "int8")), "holds no head")):
        with pytest.raises(UsageError, match=match):
            other.start(loaded)
    capped = load(str(tiny_model(tmp_path / "capped", "gemma2")))
    with pytest.raises(UsageError, match="eagle3 can't draft for"):
        drafter.start(capped)
