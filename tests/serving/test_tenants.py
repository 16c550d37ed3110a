"""What one client can learn of another's prompts: nothing where salts or keys differ."""

import functools

import pytest

from quantkit.serving.schema import MAX_SALT
from quantkit.serving.work import prefix_salt

from .conftest import APIS, asked

SECRET = "the patient is Mr. Smith, and what he has is " * 12
BODIES = {path: asked(path, SECRET) | {"temperature": 0} for path in APIS}  # every answer has the same length
KEYS = ("sesame-1", "sesame-2")


def cached(made, path, salt=None, key=None):
    """How many tokens of its prompt a request is said to have found in the cache."""
    body = BODIES[path] | ({} if salt is None else {"cache_salt": salt})
    answer = made.post(path, body, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))


@pytest.fixture
def keeping(live):
    """``keeping(**options)`` → a server that keeps prefixes."""
    return functools.partial(live, prefix_cache=1 << 26)


@pytest.mark.parametrize("path", BODIES)
def test_a_right_guess_under_another_salt_finds_nothing(keeping, eventually, path):
    made = keeping()

    def pages():
        def only_prefixes():
            stats = made.engine.stats()
            return stats["kv_used_bytes"] == stats["prefix_cache_bytes"]

        eventually(only_prefixes)
        return made.engine.stats()["kv_pages_used"]

    assert cached(made, path, "mine") == 0 < cached(made, path, "mine")
    shared = pages()
    for other in (None, "other", "mine ", "Mine"):
        assert cached(made, path, other) == 0 < cached(made, path, other)
    assert pages() >= 5 * shared, "nothing is shared either"


def test_a_right_guess_with_another_key_finds_nothing(keeping):
    made = keeping(keys=KEYS)
    for salt, path in [(None, "/v1/completions"), *((path, path) for path in BODIES)]:
        for key in KEYS:
            assert cached(made, path, salt, key) == 0 < cached(made, path, salt, key)


def test_with_one_key_all_share(keeping):
    made = keeping(keys=KEYS[:1])
    assert cached(made, "/v1/completions", key=KEYS[0]) == 0 < cached(made, "/v1/completions", key=KEYS[0])


@pytest.mark.parametrize("salt", ["", "x" * (MAX_SALT + 1), 5, ["x"]])
@pytest.mark.parametrize("path", BODIES)
def test_a_salt_is_a_text_of_some_length(shared, path, salt):
    answer = shared.post(path, BODIES[path] | {"cache_salt": salt})
    assert answer.status_code == 400
    if path != "/v1/messages":
        assert answer.json()["error"]["param"] == "cache_salt"


def test_salts_of_keys_and_of_clients_are_apart():
    salts = {prefix_salt(tenant, salt) for tenant in (b"", bytes(32), b"a" * 32) for salt in (None, "a", "b")}
    assert len(salts) == 9 and {len(salt) for salt in salts} == {0, 32}


def test_each_key_sees_the_trace_of_its_own_requests(keeping, eventually):
    made = keeping(keys=KEYS)

    def trace(key):
        answer = made.get("/trace", headers={"Authorization": f"Bearer {key}"}).json()
        return {span["request"] for model in answer["models"] for span in model["spans"]
                if span["kind"] == "end"}

    ids = []
    for key in KEYS:
        headers = {"Authorization": f"Bearer {key}"}
        answer = made.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
        made.post("/v1/embeddings", {"input": "a"}, headers=headers)
        ids.append(answer.json()["id"])
        eventually(lambda key=key: len(trace(key)) == 2)
    assert ids[0] in trace(KEYS[0]) and ids[1] in trace(KEYS[1])
    assert not trace(KEYS[0]) & trace(KEYS[1])
