"""``/v1/embeddings``: vectors of length 1, in the order of the texts, as the official client reads them."""

import asyncio
import json

import pytest
import torch

from quantkit.runtime.core import EngineFull
from quantkit.serving.openai import embeddings

PATH = "/v1/embeddings"


def embed(shared, **options):
    return shared.openai().embeddings.create(**{"model": "tiny", **options})


def test_texts_and_ids_have_the_same_vectors(shared, loaded):
    ids = loaded.tokenizer.encode("the cat")
    width = loaded.config.hidden_size
    (alone,) = embed(shared, input="the cat", encoding_format="float").data
    both = embed(shared, input=["in and on", "the cat"], encoding_format="float")
    assert [entry.index for entry in both.data] == [0, 1] and both.data[1].embedding == alone.embedding
    assert len(alone.embedding) == width and both.data[0].embedding != alone.embedding
    assert torch.tensor(alone.embedding).norm() == pytest.approx(1, abs=1e-5)
    assert embed(shared, input=ids, encoding_format="float").data[0].embedding == alone.embedding
    assert embed(shared, input=[ids], encoding_format="float").data[0].embedding == alone.embedding
    tokens = len(ids) + len(loaded.tokenizer.encode("in and on"))
    assert both.usage.prompt_tokens == both.usage.total_tokens == tokens


def test_base64_is_the_same(shared):
    """The official client asks for it by default and decodes it."""
    numbers = embed(shared, input="the cat", encoding_format="float").data[0].embedding
    assert embed(shared, input="the cat").data[0].embedding == pytest.approx(numbers, abs=1e-7)


def test_fewer_dimensions_are_normalized_again(shared):
    whole = torch.tensor(embed(shared, input="the cat").data[0].embedding)
    cut = torch.tensor(embed(shared, input="the cat", dimensions=8).data[0].embedding)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(whole[:8], dim=0))


def test_pooling_is_chosen(shared):
    last, mean = (embed(shared, input="the cat", extra_body={"pooling": kind}).data[0].embedding
                  for kind in ("last", "mean"))
    assert last != mean


def test_more_texts_than_can_wait(live):
    made = live(max_batch=2, max_queue=2)
    entries = embed(made, input=[f"number {i}" for i in range(9)]).data
    assert [entry.index for entry in entries] == list(range(9))
    assert entries[7].embedding == embed(made, input="number 7").data[0].embedding


def test_an_empty_text_has_the_vector_of_its_tokens_if_it_has_any(shared):
    answer = shared.post(PATH, {"input": ""})
    assert answer.status_code == (200 if shared.loaded.tokenizer.encode("") else 400), answer.text


@pytest.mark.parametrize("kind", ["float", "base64"])
def test_no_other_thread_waits_for_more_than_one_vector(shared, monkeypatch, kind):
    sizes, dumps = [], json.dumps

    def measured(value, **options):
        sizes.append(len(text := dumps(value, **options)))
        return text

    monkeypatch.setattr("quantkit.serving.openai.embeddings.json.dumps", measured)
    texts = [f"number {i}" for i in range(40)]
    answer = shared.post(PATH, {"model": "tiny", "input": texts, "encoding_format": kind})
    assert answer.content == dumps(answer.json(), separators=(",", ":")).encode()
    assert list(answer.json()) == ["object", "model", "data", "usage"] and len(answer.json()["data"]) == 40
    vectors = [size for size in sizes if size > len(answer.content) / 100]
    assert len(vectors) >= 40 and max(vectors) < len(answer.content) / 20


@pytest.mark.parametrize("disturb", ["drain", "full"])
def test_what_was_begun_is_completed(live, eventually, monkeypatch, disturb):
    """Also if the server is asked to end meanwhile, or others fill the queue."""
    made = live(max_batch=2, max_queue=2)
    parts = []
    work = embeddings.RequestWork
    draining = []

    def disturbed(engine, jobs, *rest):
        parts.append(len(jobs))
        if len(parts) == 2 and disturb == "drain":
            draining.append(asyncio.ensure_future(made.application.drain(60)))
        if len(parts) == 2 and disturb == "full":
            raise EngineFull("full")
        return work(engine, jobs, *rest)

    monkeypatch.setattr(embeddings, "RequestWork", disturbed)
    answer = made.post(PATH, {"input": [f"number {i}" for i in range(9)]})
    assert answer.status_code == 200 and len(answer.json()["data"]) == 9
    assert [entry["index"] for entry in answer.json()["data"]] == [*range(9)]
    assert sum(parts) == 9 + 2 * (disturb == "full")
    if disturb == "drain":
        eventually(lambda: made.application.draining)
        assert made.post(PATH, {"input": "a"}).json()["error"]["code"] == "shutting_down"


def test_without_room_for_its_first_texts_it_is_refused_at_once(live, monkeypatch):
    made = live()

    def full(*_):
        raise EngineFull("full")

    monkeypatch.setattr(embeddings, "RequestWork", full)
    answer = made.post(PATH, {"input": ["a"] * 9})
    assert answer.status_code == 503 and answer.headers["retry-after"]
