"""Both real models through every command: Llama's family with byte-level BPE, Gemma's with SentencePiece."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from quantkit.runtime.loader import load
from tests.helpers.server_process import Process

PROMPTS = ("The capital of France is", "Once upon a time", "1, 2, 3, 4,", "def add(a, b):\n")
# as completions do it, which begin with BOS if the tokenizer puts it there
CHAT = ("{% if bos_token == '<bos>' %}{{ bos_token }}{% endif %}"
        "{% for message in messages %}User: {{ message.content }}\n{% endfor %}Answer:")


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    from click.testing import CliRunner

    from quantkit.cli.main import main

    out = tmp_path_factory.mktemp("real") / "int8"
    result = CliRunner().invoke(main, ["quantize", model, "--recipe", "int8", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    return out


def test_it_is_verified_and_runs_as_one_program(cli_json, checkpoint):
    assert cli_json("verify", checkpoint)["ok"]
    assert load(str(checkpoint)).fallback_reason is None


@pytest.mark.slow
def test_it_costs_next_to_nothing_beyond_any_sliding_window(cli_json, model, checkpoint):
    """In int8, weights and KV cache: Gemma's narrower layers see 512 tokens of a window."""
    result = cli_json("eval", model, checkpoint, "--window", 800, "--windows", 1, "--prompt-tokens", 700,
                      "--kv", "none,int8", "--no-speed", "--quiet")
    plain, cached, small, both = (row["kl_mean"] for row in result["results"])
    assert plain == 0 < cached < 0.01 and small < 0.02 and both < 0.02


def test_requests_side_by_side_get_what_each_gets_alone(checkpoint, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    with Process((checkpoint, "--port", 0, "--chat-template", template)) as server:
        def answer(prompt):
            return server.ask(prompt=prompt, max_tokens=12, temperature=0).choices[0].text

        alone = [answer(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            assert list(threads.map(answer, PROMPTS)) == alone
        assert alone[2].startswith(" 5") and len(set(alone)) == len(PROMPTS)
        chat = server.client.chat.completions.create(
            model=server.where["model"], messages=[{"role": "user", "content": "Hi"}], max_tokens=12,
            temperature=0)
        assert chat.choices[0].message.content.strip() == answer("User: Hi\nAnswer:").strip()
