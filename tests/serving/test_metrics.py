"""``/metrics``: vLLM's names, and numbers that are what happened."""

from prometheus_client.parser import text_string_to_metric_families

from quantkit.runtime.drafting.ngram import NgramDrafter

NAMES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
         "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success",
         "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
         "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
         "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "cache_config_info"}


def read(made):
    answer = made.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    labels = ("le", "finished_reason")
    return {sample.name + "".join(sample.labels.get(label, "") for label in labels): sample
            for sample in samples}, answer.text


def test_names_and_labels(shared):
    samples, text = read(shared)
    families = {line.split()[2].removesuffix("_total")
                for line in text.splitlines() if line.startswith("# TYPE")}
    assert {f"vllm:{name}".removesuffix("_total") for name in NAMES} <= families
    assert all(sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"
               for sample in samples.values() if not sample.name.endswith("_created"))


def test_what_is_counted(live, eventually):
    made = live()
    prompt, n = "the cat", 2
    body = {"prompt": prompt, "max_tokens": 5, "n": n, "ignore_eos": True}
    usage = made.post("/v1/completions", body).json()["usage"]
    eventually(lambda: made.engine.stats()["tokens_generated"] == 10)
    samples, _ = read(made)

    def value(name):
        return samples[f"vllm:{name}"].value

    assert value("request_success_totallength") == n
    assert value("request_generation_tokens_sum") == usage["completion_tokens"] == 10
    assert value("request_prompt_tokens_sum") == n * usage["prompt_tokens"]
    assert value("generation_tokens_total") == 10
    assert value("time_to_first_token_seconds_count") == value("e2e_request_latency_seconds_count") == n
    assert value("inter_token_latency_seconds_count") == n * 4
    assert 0 < value("time_to_first_token_seconds_sum") <= value("e2e_request_latency_seconds_sum")
    assert value("num_requests_running") == value("num_requests_waiting") == 0


def test_drafts(live, eventually):
    """Answers that repeat themselves, with drafts and without."""
    made, plain = live(drafter=NgramDrafter(max_tokens=4, max_match=2, min_match=1)), live()
    body = {"prompt": "the cat the cat the cat", "max_tokens": 80, "n": 2, "temperature": 0,
            "ignore_eos": True}
    answer, before = (server.post("/v1/completions", body).json() for server in (made, plain))
    assert [choice["text"] for choice in answer["choices"]] == [
        choice["text"] for choice in before["choices"]]
    details = answer["usage"]["completion_tokens_details"]
    right, wrong = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert right > 0 and before["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    chat = {"messages": [{"role": "user", "content": "the cat the cat"}], "max_tokens": 60, "temperature": 0,
            "ignore_eos": True}
    details = made.post("/v1/chat/completions", chat).json()["usage"]["completion_tokens_details"]
    right += details["accepted_prediction_tokens"]
    wrong += details["rejected_prediction_tokens"]
    eventually(lambda: made.engine.stats()["tokens_generated"] == 220)
    samples, text = read(made)
    assert samples["vllm:spec_decode_num_accepted_tokens_total"].value == right
    assert samples["vllm:spec_decode_num_draft_tokens_total"].value == right + wrong
    assert 0 < samples["vllm:spec_decode_num_drafts_total"].value <= right + wrong
    places = [line for line in text.splitlines()
              if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in places) == right
    assert not any(line.startswith("vllm:spec_decode") for line in read(plain)[1].splitlines())
