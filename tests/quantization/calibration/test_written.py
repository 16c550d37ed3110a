"""Text that a model writes itself: as its own forward pass would, in the form that its template shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.quantization.calibration import written
from quantkit.quantization.calibration.finite import NonFiniteError
from quantkit.quantization.calibration.written import BEGINNINGS, QUESTIONS, WritingPrompt, write_windows
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.sources.open import open_source
from quantkit.support.errors import CalibrationError
from quantkit.testing import tiny_model
from quantkit.text.tokenizer import Tokenizer

WRITE = """
import json, sys, torch
from quantkit.quantization.calibration.written import write_windows
from quantkit.runtime.loader import load_source
from quantkit.sources.open import open_source
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.text.tokenizer import Tokenizer

source = open_source(sys.argv[1])
model = load_source(source, torch.device("cpu"))
assert type(model).__name__ == "CpuModel"
spec = CalibrationSpec(text="self", windows=3, window=100)
print(json.dumps(write_windows(model, None, Tokenizer(source.side_files(), source.config()), spec).tolist()))
"""
TEMPLATE = (b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            b"{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
START, END = 2, 3  # <|im_start|>, <|im_end|>


class Model:
    def __init__(self, folder, family="qwen2", chat=True, **overrides) -> None:
        self.folder = tiny_model(folder, family, dtype="float32", **overrides)
        source = open_source(str(self.folder))
        files, raw = dict(source.side_files()), source.config()
        if not chat:
            settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": None}
            files["tokenizer_config.json"] = json.dumps(settings).encode()
        self.files, self.raw = files, raw
        self.config, self.tokenizer = parse_config(raw), Tokenizer(files, raw)
        self.weights = Weights(source.tensor, source.tensors().__contains__, torch.float32)

    def write(self, **fields) -> torch.Tensor:
        spec = CalibrationSpec(text="self", **{"windows": 5, "window": 48, **fields})
        return write_windows(CausalLM(self.config, self.weights), self.weights, self.tokenizer, spec)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return Model(tmp_path_factory.mktemp("models") / "model")


def test_a_conversation_is_written_turn_by_turn(model):
    tokens = model.write(windows=60, window=200)
    assert tokens.dtype == torch.int64 and tokens.shape == (60, 200)
    ask = model.tokenizer.encode("<|im_start|>user\n", special=False)
    answer = model.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", special=False)
    again = model.tokenizer.encode("<|im_end|>\n<|im_start|>user\n", special=False)
    ended = 0
    for row in tokens.tolist()[::3]:  # the others begin with a question or a text of ours
        assert row[:len(ask)] == ask
        ends = [at for at, token in enumerate(row) if token in (END, 0) and at + len(answer) < len(row)]
        # what ends a turn is followed by the other one's beginning; ends inside of that don't count
        due, turn = len(ask), 0
        for at in ends:
            if at < due:
                continue
            expected = (answer, again)[turn % 2]
            expected = expected[1:] if row[at] == END else expected
            assert row[at + 1:at + 1 + len(expected)] == expected
            due, turn, ended = at + 1 + len(expected), turn + 1, ended + 1
    assert ended > 5


def test_windows_begin_in_many_ways(model):
    form, tokenizer, behind = WritingPrompt.of(model.tokenizer), model.tokenizer, 0
    again = tokenizer.encode("<|im_end|>\n<|im_start|>user\n", special=False)
    for number, row in enumerate(model.write(windows=30, window=200).tolist()):
        question = tokenizer.chat_text([{"role": "user", "content": QUESTIONS[number // 3]}], answer=True)
        opening = (form.first[0], tokenizer.encode(question, special=False),
                   tokenizer.encode(BEGINNINGS[number // 3]))[number % 3]
        assert row[:len(opening)] == [*opening]
        end = next((at for at in range(len(opening), 190) if row[at] in (END, 0)), None)
        if end is not None and number % 3:  # behind an answer and behind a text comes a user's turn
            expected, behind = again[1:] if row[end] == END else again, behind + 1
            assert row[end + 1:end + 1 + len(expected)] == expected
    assert behind > 3


def test_a_template_that_takes_no_question_alone(tmp_path):
    model = Model(tmp_path)
    alone = b"{% if messages | length == 1 %}{{ raise_exception('alone') }}{% endif %}"
    model.tokenizer = Tokenizer({**model.files, "chat_template.jinja": alone + TEMPLATE}, model.raw)
    form = WritingPrompt.of(model.tokenizer)
    texts = [(tuple(model.tokenizer.encode(text)), model.tokenizer.eos_ids) for text in BEGINNINGS[:2]]
    assert form.fallback is None
    assert form.openings(model.tokenizer, 4) == [form.first, texts[0], form.first, texts[1]]


def test_all_of_them_are_used_before_one_comes_again(model):
    openings = WritingPrompt.of(model.tokenizer).openings(model.tokenizer, 3 * len(QUESTIONS))
    assert len(QUESTIONS) == len(BEGINNINGS) and len(set(openings)) == 1 + 2 * len(QUESTIONS)


@pytest.mark.parametrize(("family", "begin"), [("llama", 1), ("qwen2", 3)])
def test_a_base_model_begins_with_bos_or_eos(tmp_path, family, begin):
    model = Model(tmp_path, family, chat=False)
    tokens = model.write()
    assert (tokens[:, 0] == begin).all()
    assert WritingPrompt.of(model.tokenizer) == WritingPrompt(((begin,), model.tokenizer.eos_ids),
                                                              (((begin,), model.tokenizer.eos_ids),))


@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 16, "use_sliding_window": True,
                                            "max_window_layers": 0}])
def test_every_token_is_drawn_from_the_models_own_distribution(tmp_path, monkeypatch, overrides):
    model, seen = Model(tmp_path, **overrides), []
    draw = written._draw

    def watched(logits, uniform):
        seen.append(torch.from_numpy(logits.copy()))
        return draw(logits, uniform)

    monkeypatch.setattr(written, "_draw", watched)
    tokens = model.write(windows=3, window=40)
    whole = CausalLM(model.config, model.weights)(tokens)[:, :-1, :model.tokenizer.vocab_size]
    torch.testing.assert_close(torch.stack(seen).unflatten(0, (39, 3)).transpose(0, 1).softmax(-1),
                               whole.softmax(-1), rtol=1e-4, atol=1e-6)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 2.0, -30.0, 1.0, float("-inf")])
    places = (torch.arange(1000) + 0.5) / 1000
    drawn = torch.tensor([written._draw(logits.numpy(), place) for place in places.tolist()])
    expected = 1000 * logits.softmax(-1)
    assert (drawn.bincount(minlength=5) - expected).abs().max() <= 1
    assert written._draw(logits.numpy(), 0.0) == 0 and written._draw(logits.numpy(), 1.0) == 3


def test_kernels_write_the_same_text_on_every_cpu(model, tmp_path):
    """Whatever instructions they use, and whatever torch does."""
    script = tmp_path / "write.py"
    script.write_text(WRITE)
    settings = [{}, {"QUANTKIT_ISA": "plain", "ATEN_CPU_CAPABILITY": "default"}]
    texts = {subprocess.run([sys.executable, str(script), str(model.folder)], check=True, text=True,
                            capture_output=True, env={**os.environ, **setting}).stdout
             for setting in settings}
    assert len(texts) == 1 and len(json.loads(texts.pop())) == 3


def test_the_seed_chooses_and_batches_are_whole(model, monkeypatch):
    one, same, other = (model.write(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert len({tuple(row) for row in one.tolist()}) == 5
    monkeypatch.setattr(written, "WRITTEN", 2)
    parts = model.write(seed=1)
    assert parts.shape == (5, 48) and len({tuple(row) for row in parts.tolist()}) == 5


def test_a_template_that_hides_what_is_said_is_not_used(tmp_path):
    model = Model(tmp_path)
    model.tokenizer._files = {"chat_template.jinja": b"{{ bos_token }}{{ messages | length }}"}
    form = WritingPrompt.of(model.tokenizer)
    assert form.first == ((END,), model.tokenizer.eos_ids)
    assert form.fallback.startswith("the model wrote plain text") and "turns begin and end" in form.fallback


@pytest.mark.parametrize("template", [b"{{ raise_exception('no such thing') }}", b"{% if %}"])
def test_a_template_that_fails_is_a_fallback_with_the_reason(tmp_path, template):
    model = Model(tmp_path)
    assert WritingPrompt.of(model.tokenizer).fallback is None
    model.tokenizer = Tokenizer({**model.files, "chat_template.jinja": template}, model.raw)
    form = WritingPrompt.of(model.tokenizer)
    assert form.first == ((END,), model.tokenizer.eos_ids) and "chat template" in form.fallback
    assert ("no such thing" in form.fallback) == (b"raise" in template)


def test_nothing_to_begin_with(tmp_path):
    model = Model(tmp_path, chat=False)
    model.tokenizer.bos_id = model.tokenizer.eos_id = None
    with pytest.raises(CalibrationError, match="can't write a calibration text") as caught:
        model.write()
    assert "builtin" in caught.value.next


@pytest.mark.parametrize(("name", "tensor", "layer"), [
    ("model.norm.weight", "the model's output is NaN or infinite while it writes its calibration text", None),
    ("model.layers.1.mlp.up_proj.weight", "the output of model.layers.1.mlp.up_proj is NaN or infinite", 1),
    ("model.embed_tokens.weight", "the hidden state after the embedding is NaN or infinite", None)])
def test_what_is_not_finite_is_named(tmp_path, name, tensor, layer):
    model = Model(tmp_path)
    plain = model.weights._tensor
    model.weights._tensor = lambda one: plain(one) * (float("nan") if one == name else 1)
    with pytest.raises(NonFiniteError) as caught:
        model.write()
    assert (caught.value.tensor, caught.value.sample, caught.value.layer) == (tensor, 0, layer)
