"""Several models in one server: each request gets the one that it names."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.serving.errors import ApiError
from quantkit.serving.models import ServedModels
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model than the shared one."""
    return load(str(tiny_model(tmp_path_factory.mktemp("models") / "other", "qwen2", seed=5,
                               dtype="float32")))


@pytest.fixture
def both(live, loaded, other):
    return live(models={"a/one": loaded, "two": other})


def test_each_is_chosen_by_its_name(both, loaded, other):
    client = both.openai()
    for name, model in (("a/one", loaded), ("two", other), ("a/one", loaded)):
        wanted = generate(model, [model.tokenizer.encode("the cat")], Sampling(max_tokens=9))[0].text
        answer = client.completions.create(model=name, prompt="the cat", max_tokens=9, temperature=0)
        assert answer.choices[0].text == wanted and answer.model == name
    assert [model.id for model in client.models.list()] == ["a/one", "two"]
    assert client.models.retrieve("a/one").chat is True
    assert client.models.retrieve("a/one").max_model_len == loaded.config.max_position_embeddings
    assert client.models.retrieve("two").max_model_len == other.config.max_position_embeddings


def test_both_at_once(both, loaded, other):
    def ask(name):
        return both.post("/v1/completions", {"model": name, "prompt": "the cat", "max_tokens": 60,
                                             "temperature": 0}).json()["choices"][0]["text"]

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, ("a/one", "two")))
    assert answers == [generate(model, [model.tokenizer.encode("the cat")], Sampling(max_tokens=60))[0].text
                       for model in (loaded, other)]


def test_an_unknown_name_is_told_what_there_is(both):
    answer = both.post("/v1/completions", {"model": "three", "prompt": "a"})
    assert answer.status_code == 404 and "'a/one', 'two'" in answer.json()["error"]["message"]
    with both.http as client:
        answer = client.post("/tokenize", json={"prompt": "a"})
    assert answer.status_code == 400 and "'a/one', 'two'" in answer.json()["error"]["message"]


def test_each_has_its_own_state(both, eventually):
    with both.http as client:
        ready = client.get("/ready").json()
        assert set(ready["models"]) == {"a/one", "two"} and ready["max_queue"] == 128
        assert ready["status"] == "ready" and client.get("/health").json() == {"status": "ok"}
        assert both.post("/v1/completions", {"model": "two", "prompt": "a", "max_tokens": 3,
                                             "ignore_eos": True}).status_code == 200
        eventually(lambda: [client.get("/ready").json()["models"][name]["tokens_generated"]
                            for name in ("a/one", "two")] == [0, 3])
        measured = client.get("/metrics").text
    assert 'vllm:generation_tokens_total{engine="1",model_name="two"} 3.0' in measured


def test_the_description_names_both(both, loaded):
    parts = both.get("/openapi.json").json()["components"]["schemas"]
    assert parts["ChatRequest"]["properties"]["model"]["enum"] == ["a/one", "two"]


def test_names_are_listed_up_to_a_bound():
    many = ServedModels([SimpleNamespace(name=f"model-{i}") for i in range(30)])
    with pytest.raises(ApiError, match="'model-9' and 20 more") as caught:
        many.find("x" * 10_000)
    assert len(caught.value.detail) < 600


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_models_that_cant_be(names):
    with pytest.raises(UsageError, match="no model" if not names else "same name"):
        ServedModels([SimpleNamespace(name=name) for name in names])


def test_all_engines_are_closed_and_the_first_error_is_raised():
    closed = []

    def model(name):
        def close():
            closed.append(name)
            if name != "c":
                raise RuntimeError(name)

        return SimpleNamespace(name=name, engine=SimpleNamespace(close=close))

    with pytest.raises(RuntimeError, match="a"):
        ServedModels([model(name) for name in "abc"]).close()
    assert closed == ["a", "b", "c"]


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather in a city.",
                                            "parameters": CITY}}


def test_a_real_model_streams_calls_while_another_is_under_load(live, loaded, smollm2):
    """What is streamed is what is answered whole, of either model, whoever else is asking."""
    pytest.importorskip("llguidance", reason="structured output needs the extra 'structure'")
    client = live(models={"real": load(smollm2), "tiny": loaded}, max_batch=4).openai()
    asked = {"model": "real", "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
             "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0,
             "max_tokens": 60}
    plain = {"model": "tiny", "prompt": "the cat", "max_tokens": 80, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0]
    text = client.completions.create(**plain).choices[0].text

    def call():
        parts = [part for chunk in client.chat.completions.create(**asked, stream=True)
                 for part in chunk.choices]
        calls = [call for part in parts for call in part.delta.tool_calls or []]
        assert {call.index for call in calls} == {0}
        return ("".join(call.function.name or "" for call in calls),
                "".join(call.function.arguments or "" for call in calls),
                [part.finish_reason for part in parts if part.finish_reason])

    def complete():
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**plain, stream=True))

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(call) for _ in range(2)]
        texts = [pool.submit(complete) for _ in range(4)]
    (made,) = whole.message.tool_calls
    assert [one.result() for one in texts] == [text] * 4
    assert made.function.name == "weather" and json.loads(made.function.arguments)["city"] in ("Oslo", "Rome")
    assert [one.result() for one in calls] == [("weather", made.function.arguments, ["tool_calls"])] * 2
