"""What llama.cpp makes of exported files. ``QUANTKIT_TEST_LLAMA`` names the folder of its shared library."""

from __future__ import annotations

import pytest
import torch

from quantkit.export.gguf.export import export_gguf
from quantkit.quantization.run import quantize
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model
from tests.helpers.small_tokenizers import phi3_like, sentencepiece

INT8 = "{bits: 8, granularity: {strategy: group, size: 32}}"
RECIPE = f"rules:\n  - {{match: '*', method: rtn, spec: {INT8}}}\n"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"partial_rotary_factor": 0.75, "max_position_embeddings": 4096, "rope_scaling": {
    "rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0, 2.0, 3.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0]}}
FAMILIES = ("gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
OSS = {"tie_word_embeddings": False, "rope_theta": 10387.0}
OSS_YARN = {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 640}
"""Whose ramp, from 1.002 to 3.9995, is nearly the same when it is rounded to whole dimensions."""
CASES = [*((family, {}) for family in FAMILIES), ("gpt_oss", {**OSS, "rope_scaling": OSS_YARN}),
         ("gpt_oss", {**OSS, "rope_scaling": {"rope_type": "default"}}),
         ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
         ("llama", {"rope_scaling": LLAMA3}), ("qwen2", {"rope_scaling": YARN}),
         ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.0}}), ("mixtral", {"rope_scaling": YARN}),
         ("qwen3", {"rope_scaling": YARN}),
         ("gemma2", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
         ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
         ("gemma2", {"rope_scaling": YARN}), ("gemma3_text", {"rope_scaling": YARN}),
         ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
         ("phi3", {**LONG, "original_max_position_embeddings": 1024}),  # the short factors
         ("phi3", {**LONG, "original_max_position_embeddings": 32}),  # the long ones
         ("gemma2", {"num_hidden_layers": 3}), ("llama", {"vocab_size": 320}),
         ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 6})]
TEXTS = ("The history of the harbour begins with a pier.", "  two  spaces\tand\ttabs\n\n\nlines\r\n ", "",
         "naïve Äpfel нещо 日本語 한국어 🚀🏽 ½ ²³ Ⅷ नमस्ते مرحبا",
         "12345678 3.14 it's I'LL y'all's $5.00 ~`x`",
         "def f(x):\n    return {'a': x**2}  # 你好\n\t\tif a<=b:\n",
         "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
         "HelloWorld under_score--dash...!!! ???\n/path/to/file\n", "\u200b\ufeff\u3000|\u00a0\u2028 \u0301x",
         "a" * 300 + " " * 60 + "b\n" * 40)


def names(case) -> str:
    return "-".join([case[0], *(str(key) for key in case[1])])


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Of the distributions at each position."""
    ours, theirs = (logits.double().log_softmax(-1) for logits in (ours, theirs))
    return (ours.exp() * (ours - theirs)).sum(-1)


@pytest.mark.oracle
@pytest.mark.parametrize(("family", "overrides"), CASES, ids=map(names, CASES))
def test_nearly_the_same_logits_and_the_same_tokens(tmp_path, llama_cpp, family, overrides):
    source = tiny_model(tmp_path / "model", family, dtype="float32", **overrides)
    rule = f"{{match: '*.1.*o_proj', method: rtn, format: gptq, spec: {INT8}}}"
    (tmp_path / "recipe.yaml").write_text(f"rules:\n  - {rule}\n  - {{match: '*'}}\n")
    checkpoint = quantize(str(source), str(tmp_path / "recipe.yaml"), tmp_path / "checkpoint").out
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    loaded = load(str(checkpoint), dtype="float32")
    ids = torch.randint(4, 300, (72,), generator=torch.Generator().manual_seed(0)).tolist()
    with llama_cpp(result.out) as session:
        theirs = session.predict(ids, 0).logits
        assert session.encode(TEXTS[0]) == loaded.tokenizer.encode(TEXTS[0], special=False)
    with torch.no_grad():
        ours = loaded.model(torch.tensor([ids[:-1]]))[0].float()
    gaps = divergence(ours, theirs)
    # llama.cpp rounds the inputs of a quantized layer, which may send a token to another expert
    assert gaps.median() < 1e-3 and gaps.quantile(0.9) < 5e-3, (gaps.median(), gaps.max())
    best = ours.topk(2, dim=-1)
    sure = (best.values[:, 0] - best.values[:, 1] > 0.2) & (gaps < 0.05)
    assert sure.float().mean() > 0.6 and torch.equal(best.indices[sure, 0], theirs.argmax(-1)[sure])


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece without a space in front", "phi3"])
def test_tokens_of_hard_texts(tmp_path, llama_cpp, kind):
    family = "phi3" if kind == "phi3" else "llama"
    library = phi3_like() if kind == "phi3" else sentencepiece(prefix=kind == "sentencepiece")
    source = tiny_model(tmp_path / "model", family, vocab_size=library.get_vocab_size() + 5)
    library.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}')
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    checkpoint = quantize(str(source), str(tmp_path / "recipe.yaml"), tmp_path / "checkpoint").out
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    tokenizer, back = load(str(checkpoint)).tokenizer, load(str(result.out)).tokenizer
    with llama_cpp(result.out) as session:
        for text in (*TEXTS, "hello the in", "<s> hello</s>  the", "<|user|>\n hi <|end|>  <s> x"):
            ids = tokenizer.encode(text, special=False)
            assert session.encode(text) == ids and back.encode(text, special=False) == ids, text


def predicts_alike(llama_cpp, file, checkpoint) -> None:
    """llama.cpp's predictions of random tokens are nearly the checkpoint's."""
    ids = torch.randint(4, 300, (72,), generator=torch.Generator().manual_seed(0)).tolist()
    with llama_cpp(file) as session, torch.no_grad():
        theirs = session.predict(ids, 0).logits
        ours = load(str(checkpoint), dtype="float32").model(torch.tensor([ids[:-1]]))[0].float()
    assert divergence(ours, theirs).mean() < 0.01


@pytest.mark.oracle
@pytest.mark.parametrize("spec", [
    INT8, "{bits: 4, granularity: {strategy: group, size: 64}}",
    "{bits: 5, granularity: {strategy: channel}}",
    "{bits: 4, symmetric: false, minimum: true, granularity: {strategy: group, size: 32}}, format: gguf-q4_1",
    "{bits: 3, symmetric: false, granularity: {strategy: group, size: 32}}"])
def test_all_layers_quantized(tmp_path, llama_cpp, spec):
    source = tiny_model(tmp_path / "model", "qwen2")
    (tmp_path / "recipe.yaml").write_text(
        f"rules:\n  - {{match: 'model.embed_tokens', method: rtn, spec: {spec}}}\n"
        f"  - {{match: '*', method: rtn, spec: {spec}}}\n")
    checkpoint = quantize(str(source), str(tmp_path / "recipe.yaml"), tmp_path / "checkpoint").out
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    predicts_alike(llama_cpp, result.out, checkpoint)


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["q4_0", "q4_1", "q5_1", "q8_0", "iq4_nl", "q4_k", "q5_k", "q6_k"])
def test_layers_in_blocks_of_llama_cpp(tmp_path, llama_cpp, form):
    source = tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=256, dtype="float32")
    (tmp_path / "recipe.yaml").write_text(f"rules:\n  - {{match: '*', method: rtn, format: gguf-{form}}}\n")
    checkpoint = quantize(str(source), str(tmp_path / "recipe.yaml"), tmp_path / "checkpoint").out
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    assert {tensor.kind for tensor in result.tensors} == {form.upper(), "F32"}
    predicts_alike(llama_cpp, result.out, checkpoint)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("form", ["", ", format: gguf-q8_0"])
def test_smollm2(tmp_path, llama_cpp, smollm2, form):
    spec = INT8.replace("8,", "8, signed: true,") if form else INT8
    (tmp_path / "recipe.yaml").write_text(f"rules:\n  - {{match: '*', method: rtn{form}, spec: {spec}}}\n")
    checkpoint = quantize(smollm2, str(tmp_path / "recipe.yaml"), tmp_path / "checkpoint").out
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    loaded = load(str(checkpoint), dtype="float32")
    prompt = loaded.tokenizer.encode("The history of the harbour begins with a small wooden pier, which")
    chat = loaded.tokenizer.chat([{"role": "user", "content": "Name three colours."}])
    with llama_cpp(result.out) as session:
        for text in TEXTS:
            assert session.encode(text) == loaded.tokenizer.encode(text, special=False), text
        for ids in (prompt, chat):
            answer = generate(loaded, [ids], Sampling(max_tokens=24, temperature=0.0))[0].token_ids
            theirs = session.predict([*ids, *answer], len(ids) - 1).logits
            with torch.no_grad():
                ours = loaded.model(torch.tensor([[*ids, *answer[:-1]]]))[0, len(ids) - 1:].float()
            assert divergence(ours, theirs).mean() < 5e-3
            best = ours.topk(2, dim=-1)
            sure = best.values[:, 0] - best.values[:, 1] > 0.3
            assert sure.float().mean() > 0.6
            assert torch.equal(theirs.argmax(-1)[sure], best.indices[sure, 0])


@pytest.mark.oracle
@pytest.mark.slow
def test_gemma_of_sentencepiece(tmp_path, llama_cpp, gemma3):
    rule = f"{{match: '*.0.mlp.down_proj', method: rtn, spec: {INT8}}}"
    (tmp_path / "recipe.yaml").write_text(f"rules:\n  - {rule}\n  - {{match: '*'}}\n")
    checkpoint = quantize(gemma3, str(tmp_path / "recipe.yaml"), tmp_path / "checkpoint").out
    result = export_gguf(str(checkpoint), tmp_path / "m.gguf")
    loaded = load(str(checkpoint))
    ids = loaded.tokenizer.encode("The history of the harbour begins with a small wooden pier, which was")
    with llama_cpp(result.out) as session:
        for text in TEXTS:
            assert session.encode(text) == loaded.tokenizer.encode(text, special=False), text
        theirs = session.predict(ids, 0).logits
    with torch.no_grad():
        ours = loaded.model(torch.tensor([ids[:-1]]))[0].float()
    assert divergence(ours, theirs).mean() < 0.02
