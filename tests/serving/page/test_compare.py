"""Two models side by side: the first difference is where the API's tokens differ."""

import math

import pytest
from safetensors.torch import load_file, save_file

from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

from .conftest import playwright, send

expect = playwright.expect


@pytest.fixture(scope="module")
def similar(tmp_path_factory):
    """The shared tiny model with slightly other weights."""
    folder = tiny_model(tmp_path_factory.mktemp("compare") / "similar", dtype="float32")
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * (1 + 0.03 * (weight * 1000).sin()) for name, weight in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    return load(str(folder))


def tokens(server, model, text):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0,
            "max_tokens": 40, "logprobs": True, "top_logprobs": 5}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    return choice["logprobs"]["content"]


def compare(page, text):
    page.get_by_role("button", name="Compare").click()
    send(page, text)
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".side .speed").filter(has_text="first after")).to_have_count(2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["the cat", "a long story of the sea", "what is it?"])
def test_the_first_differing_token_is_the_apis(live, loaded, similar, visit, text):
    server = live(models={"plain": loaded, "similar": similar})
    page = visit(server.url, tokens=40)
    compare(page, text)
    sides = [tokens(server, name, text) for name in ("plain", "similar")]
    where = next(at for at, pair in enumerate(zip(*sides)) if pair[0]["token"] != pair[1]["token"])
    expect(page.locator(".verdict")).to_have_text(f"The first difference is token {where + 1}.")
    for index, side in enumerate(sides):
        assert page.evaluate("index => [...document.querySelectorAll('.side')][index]"
                             ".querySelector('mark').title", index).split("\n")[0].endswith(
            f": {100 * math.exp(side[where]['logprob']):.1f} %")
    shown = page.locator(".side-text .common").all_text_contents()
    assert shown[0] == shown[1]


def test_answers_and_their_figures_stand_above_the_fold(live, loaded, twin, visit):
    page = visit(live(models={"one": loaded, "other": twin}).url, tokens=400)
    note = page.locator("#compare .empty")
    page.get_by_role("button", name="Compare").click()
    expect(note).to_contain_text("One prompt goes to both")
    page.get_by_role("button", name="Compare").click()
    compare(page, "the cat")
    expect(note).to_be_hidden()
    form = page.locator("#form").bounding_box()
    for side in range(2):
        figures = page.locator(".side .speed").nth(side).bounding_box()
        assert figures["y"] + figures["height"] < form["y"] - 100, "whatever the length of an answer"


def test_equal_models_get_the_same_parameters_and_have_equal_answers(live, loaded, twin, visit):
    page = visit(live(models={"one": loaded, "other": twin}).url)
    bodies = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    page.get_by_role("button", name="Settings").click()
    page.fill("#system", "Be brief.")
    page.get_by_role("button", name="Done").click()
    compare(page, "the cat")
    first, second = sorted(bodies, key=lambda body: body["model"])
    assert first == {**second, "model": "one"} and first["temperature"] == 0
    assert [message["content"] for message in first["messages"]] == ["Be brief.", "the cat"]
    expect(page.locator(".verdict")).to_have_text("The answers are equal: 12 tokens.")
    assert page.locator("mark").count() == 0
    shown = page.locator(".side-text").all_text_contents()
    assert shown[0] == shown[1]


def test_it_stops_and_goes_back_to_the_chat(live, loaded, twin, visit, eventually):
    server = live(models={"one": loaded, "other": twin})
    page = visit(server.url, tokens=20000)
    page.get_by_role("button", name="Compare").click()
    send(page, "the cat")
    eventually(lambda: all(page.locator(".side-text").all_text_contents())
               and page.locator(".side-text").count() == 2)
    page.keyboard.press("Escape")
    expect(page.locator(".side .speed").filter(has_text="stopped")).to_have_count(2)
    expect(page.locator(".verdict")).to_contain_text("Stopped: equal so far, ")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#thread")).to_be_visible()
    eventually(lambda: server.engine.stats()["running"] == 0)


def test_with_one_model_there_is_nothing_to_compare(shared, visit):
    expect(visit(shared.url).locator("#compare-toggle")).to_be_hidden()


def test_a_difference_without_tokens_is_found_in_the_texts(shared, visit):
    page = visit(shared.url)
    verdict = page.evaluate("""() => {
      const sides = ["the cat", "the dog"].map((text) => {
        const side = new Side({ id: "x" });
        side.take({ delta: { content: text }, logprobs: null });
        return side;
      });
      const result = element("p");
      mark(sides, result);
      return [result.textContent, sides[1].body.querySelector("mark").textContent];
    }""")
    assert verdict == ["The first difference is character 5.", "d"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ended, verdict", [
    (["stop", "stop"], "The first difference is token 3."),
    (["stop", "stopped"], "Stopped: equal so far, 2 tokens."),
    (["stopped", "stopped"], "Stopped: equal so far, 2 tokens."),
    (["length", "error"], "No comparison: an answer failed."),
    (["", "stop"], "Equal so far: 2 tokens.")])
def test_only_answers_that_ended_by_themselves_differ_in_their_length(shared, visit, ended, verdict):
    page = visit(shared.url)
    assert page.evaluate("""(ended) => {
      const sides = ["abc", "ab"].map((text, index) => {
        const side = new Side({ id: "x" });
        for (const token of text) {
          const content = [{ token, logprob: 0, top_logprobs: [] }];
          side.take({ delta: { content: token }, logprobs: { content } });
        }
        side.ended = ended[index];
        return side;
      });
      const result = element("p");
      mark(sides, result);
      return result.textContent;
    }""", ended) == verdict


def test_an_answer_that_fails_is_no_difference(live, loaded, twin, visit):
    page = visit(live(models={"one": loaded, "other": twin}).url, refused=500)
    page.route("**/v1/chat/completions", lambda route: (
        route.fulfill(status=500, json={"error": {"message": "it broke"}})
        if route.request.post_data_json["model"] == "other" else route.continue_()))
    page.get_by_role("button", name="Compare").click()
    send(page, "the cat")
    expect(page.locator(".side .error")).to_have_text("it broke")
    expect(page.locator(".verdict")).to_have_text("No comparison: an answer failed.")
    assert page.locator(".side mark").count() == 0
