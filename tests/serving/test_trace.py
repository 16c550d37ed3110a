"""``/trace``: a client finds its request under the answer's id, and a page that polls misses nothing."""

import itertools
import json
from collections import defaultdict

import pytest

from quantkit.runtime.drafting.ngram import NgramDrafter
from quantkit.serving.timeline import TraceResponse

from .conftest import APIS, CHAT, TEXT, asked


def trace(made, since=None):
    answer = made.get("/trace", params={} if since is None else {"since": since})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    TraceResponse.model_validate_json(answer.text, strict=True)
    return answer.json()


def spans(answer, request=None):
    return [span for model in answer["models"] for span in model["spans"]
            if request is None or span["request"] == request]


def ended(made, count):
    return lambda: sum(span["kind"] == "end" for span in spans(trace(made))) >= count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answers_id_names_its_spans(live, eventually, path, stream):
    made = live()
    body = asked(path, most=7) | ({"ignore_eos": True} if path in (CHAT, TEXT) else {})
    answer = made.post(path, body | {"stream": stream})
    assert answer.status_code == 200
    event = json.loads(next(line for line in answer.text.splitlines() if line.startswith("data: "))[6:]) if (
        stream) else answer.json()
    event = event.get("response") or event.get("message") or event
    eventually(ended(made, 1))
    answer = trace(made)
    line = spans(answer, event["id"])
    assert line == spans(answer) and "choice" not in line[0]
    assert [line[0]["kind"], line[1]["kind"], line[-1]["kind"]] == ["queue", "prefill", "end"]
    assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(line))
    assert line[0]["start"] > 0 and line[-1]["end"] < answer["now"]
    (model,) = answer["models"]
    tokens = sum(span["tokens"] for span in line if span["kind"] == "decode")
    assert tokens == model["stats"]["tokens_generated"] == sum(step["tokens"] for step in model["steps"])
    assert model["model"] == "tiny" and len(model["steps"]) == model["stats"]["steps"]


def test_choices(live, eventually):
    made = live()
    answer = made.post(CHAT, asked(CHAT, most=5) | {"n": 3, "ignore_eos": True}).json()
    eventually(ended(made, 3))
    choices = defaultdict(int)
    for span in spans(trace(made), answer["id"]):
        choices[span["choice"]] += span["tokens"] if span["kind"] == "decode" else 0
    assert choices == {0: 5, 1: 5, 2: 5}
    assert made.post("/v1/embeddings", {"input": [f"number {i}" for i in range(20)]}).status_code == 200
    eventually(ended(made, 23))
    vectors = [span for span in spans(trace(made)) if span["request"].startswith("embd-")]
    assert {span["choice"] for span in vectors} == set(range(20))
    assert len({span["request"] for span in vectors}) == 1


def test_whoever_polls_gets_everything_once(live, eventually):
    made = live()
    answer = trace(made)
    assert spans(answer) == [] and 0 < answer["now"] < trace(made)["now"]
    polled, since = [], answer["now"]
    with made.endless(300) as stream:
        for number, _ in enumerate(stream):
            if number % 20 == 0:
                answer = trace(made, since)
                polled, since = polled + spans(answer), answer["now"]
    eventually(ended(made, 1))
    answer = trace(made, since)
    every = spans(trace(made))
    assert polled + spans(answer) == every and [span["kind"] for span in every].count("decode") == 300
    assert spans(trace(made, answer["now"])) == [] and trace(made, answer["now"])["models"][0]["steps"] == []


def test_the_state_of_the_cache(live):
    made = live(drafter=NgramDrafter(max_tokens=4, max_match=2, min_match=1))
    config, stats = made.loaded.config, trace(made)["models"][0]["stats"]
    assert stats["kv_pages_total"] is None, "it grows"
    assert stats["kv_bytes_per_token_bf16"] == config.num_layers * config.num_kv_heads * config.head_dim * 4
    # the model's float32 vectors are kept as they are
    assert stats["kv_bytes_per_token"] == 2 * stats["kv_bytes_per_token_bf16"]
    client = made.openai()
    with client.completions.create(model="tiny", prompt="the cat the cat", max_tokens=50_000, stream=True,
                                   temperature=0, extra_body={"ignore_eos": True}) as stream:
        for _ in itertools.islice(stream, 100):
            pass
        stats = trace(made)["models"][0]["stats"]
    assert stats["kv_pages_used"] >= config.num_layers * config.num_kv_heads * 2
    assert stats["kv_pages_shared"] == 0
    stats = trace(made)["models"][0]["stats"]
    assert stats["drafted"] >= stats["accepted"] > 0


@pytest.mark.parametrize(("since", "status"), [
    ("0", 200), ("1e3", 200), ("12", 200), ("-1", 400), ("nan", 400), ("inf", 400), ("soon", 400), ("", 400)])
def test_since(shared, since, status):
    answer = shared.get(f"/trace?since={since}")
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert error["param"] == "since" and error["code"] == "invalid_value", error
