"""Routes that no client library has: vLLM's ``/tokenize``, ``/detokenize`` and ``/metrics``, health, errors.

    quantkit serve-local MODEL
    python evals/serving/clients/other_routes.py [URL]

Needs ``pip install httpx prometheus-client``, whose parser reads the metrics. The last line is ``N passed, M
failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import sys

import httpx
from prometheus_client.parser import text_string_to_metric_families
from suite import QUESTION, TEXTS, Suite, server

METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
           "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
           "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success",
           "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
           "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
           "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
           "vllm:request_prompt_tokens", "vllm:request_generation_tokens")
"""Names of vLLM's version 1 engine, as its dashboards use them; of counters without ``_total``."""


def main() -> int:
    """Returns the exit code."""
    url, model = server(__doc__)
    suite = Suite("other routes")
    with httpx.Client(base_url=url, timeout=60) as client:
        def ok(path: str, **body: object) -> dict:
            answer = client.post(path, json={"model": model, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        with suite.check("tokenize and detokenize"):
            tokens = ok("/tokenize", prompt=TEXTS[0], add_special_tokens=False)
            assert tokens["count"] == len(tokens["tokens"]) > 3 and tokens["max_model_len"] > 1000
            assert ok("/detokenize", tokens=tokens["tokens"])["prompt"] == TEXTS[0]
        with suite.check("tokenize: a conversation has as many tokens as usage says"):
            count = ok("/tokenize", messages=QUESTION)["count"]
            assert ok("/v1/chat/completions", messages=QUESTION, max_tokens=1)["usage"][
                "prompt_tokens"] == count
        with suite.check("health needs no body and says so at once"):
            assert client.get("/health").status_code == 200
            assert client.get("/health").elapsed.total_seconds() < 1
        with suite.check("metrics: vLLM's names, labels and kinds"):
            families = read(client)
            missing = [name for name in METRICS if name not in families]
            assert not missing, missing
            assert families["vllm:time_to_first_token_seconds"].type == "histogram"
            assert families["vllm:generation_tokens"].type == "counter"
            assert families["vllm:num_requests_running"].samples[0].labels["model_name"] == model
        with suite.check("metrics: counters count"):
            before = read(client)
            used = ok("/v1/chat/completions", messages=QUESTION, max_tokens=5)["usage"]
            after = read(client)

            def grew(name: str, suffix: str = "_total") -> float:
                return total(after, name, suffix) - total(before, name, suffix)

            assert grew("vllm:generation_tokens") == used["completion_tokens"]
            assert grew("vllm:request_success") == 1
            assert grew("vllm:time_to_first_token_seconds", "_count") == 1
            assert grew("vllm:e2e_request_latency_seconds", "_count") == 1
            assert total(after, "vllm:num_requests_running", "") == 0
        for label, request in (("no such route", ("GET", "/v1/nothing")), ("wrong method", (
                "GET", "/v1/chat/completions")), ("no JSON", ("POST", "/v1/chat/completions"))):
            with suite.check(f"{label}: OpenAI's error body"):
                answer = client.request(*request, content=b"{" if request[0] == "POST" else None)
                assert answer.status_code in (400, 404, 405)
                assert {"message", "type", "param", "code"} == set(answer.json()["error"])
        with suite.check("a foreign Host and a foreign Origin are refused"):
            for header in ({"host": "evil.example:80"}, {"origin": "http://evil.example"}):
                assert client.get("/v1/models", headers=header).status_code == 403
    return suite.finish()


def read(client: httpx.Client) -> dict:
    """The metrics by name."""
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def total(families: dict, name: str, suffix: str) -> float:
    """The sum of a metric over its labels."""
    return sum(sample.value for sample in families[name].samples if sample.name == name + suffix)


if __name__ == "__main__":
    sys.exit(main())
