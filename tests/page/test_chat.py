"""The chat page in a real browser, against a real server: questions, answers, settings and failures."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.chat_page import PHONE, Script, address, ask, opened, say
from tests.support.served import Served, eventually, serving

QUESTION = "What is paged attention?"


def test_an_answer_and_its_figures(page: Page, server: Served) -> None:
    ask(page, QUESTION)
    expect(page.locator(".question")).to_have_text(QUESTION)
    figures = page.locator(".figures")
    expect(figures).to_contain_text("tokens/s")
    expect(figures).to_contain_text("first token")
    expect(page.locator(".context")).to_contain_text(re.compile(r"\d+ of 2,048 tokens of context"))
    client = server.client()
    messages: Any = [{"role": "user", "content": QUESTION}]
    expected = client.chat.completions.create(model="kvern-1m", messages=messages, temperature=0)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer")).to_contain_text(str(expected.choices[0].message.content)[:40])
    page.reload()
    expect(page.locator(".answer")).to_contain_text(str(expected.choices[0].message.content)[:40])
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_settings_are_sent_where_they_are_set(page: Page) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if "chat" in request.url else None)
    page.get_by_role("button", name="Settings").click()
    for label, value in {
        "System prompt": "Answer in short.",
        "Max tokens": "12",
        "Seed": "3",
        "Top k": "40",
        "Min p": "0.05",
        "Stop strings": "END\n\\n\\n",
    }.items():
        page.get_by_label(label).fill(value)
    for number in (1, 2):
        ask(page, f"What is {number} + 1?")
        expect(page.locator(".figures")).to_have_count(number)
    bodies = [body for body in bodies if body and "messages" in body]
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    sent = {name: bodies[1].get(name) for name in ("max_tokens", "seed", "top_k", "min_p", "stop", "model")}
    assert sent == {
        "max_tokens": 12,
        "seed": 3,
        "top_k": 40,
        "min_p": 0.05,
        "stop": ["END", "\n\n"],
        "model": "kvern-1m",
    }
    assert "temperature" not in bodies[1]
    assert "enable_thinking" not in bodies[1]
    page.get_by_role("button", name="Reset all").click()
    expect(page.get_by_label("Max tokens")).to_have_value("")


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request(page: Page, server: Served, how: str) -> None:
    page.route("**/v1/chat/completions", _endless)
    before = server.figure("request_success_total", finished_reason="abort")
    ask(page, "Tell me a story about a fox.")
    expect(page.locator(".answer .markdown")).to_contain_text(re.compile(r"\w+ \w+"))
    with server.held():
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(page.locator(".figures")).to_contain_text("stopped")
        expect(page.locator(".answer .markdown")).to_contain_text(re.compile(r"\w+ \w+"))
        eventually(lambda: server.figure("request_success_total", finished_reason="abort") == before + 1)
    eventually(lambda: server.figure("num_requests_running") == 0)


def test_errors_are_told_in_words(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("9999999")
    ask(page, "What is 2 + 2?")
    expect(page.get_by_role("alert")).to_contain_text("temperature is 9999999")
    page.get_by_label("Temperature").fill("")
    ask(page, "hello " * 2100)  # longer than the context: the page counts before it sends
    alert = page.locator(".composer [role=alert]")
    expect(alert).to_contain_text("the model's context holds 2,048")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    expect(page.locator(".question")).to_have_count(1)


@pytest.mark.nightly
def test_an_answer_outlives_its_server(browser: Browser) -> None:
    with serving("kvern-1m", "--threads", "1", "--dtype", "float32") as server, opened(browser) as context:
        page = context.new_page()
        page.goto(address(server))
        page.route("**/v1/chat/completions", _endless)
        ask(page, "Tell me a story about a fox.")
        expect(page.locator(".answer .markdown")).to_contain_text(re.compile(r"\w+ \w+"))
        with server.held():
            server.process.kill()
            expect(page.locator(".answer [role=alert]")).to_contain_text("The answer broke off")
        expect(page.locator(".composer [role=alert]", has_text="Is kvern serve running there?")).to_be_visible()
        text = page.locator(".answer .markdown").inner_text()
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".turn")).to_have_count(0)
        page.get_by_role("link", name="Tell me a story").click()
        expect(page.locator(".answer .markdown")).to_have_text(text, use_inner_text=True)
        expect(page.get_by_role("button", name="Go on")).to_be_visible()


def _endless(route: Route) -> None:
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True, "max_tokens": 1900}))


def test_a_lost_answer_goes_on_when_the_server_is_back(page: Page) -> None:
    script = Script(page)
    ask(page, "Count to four.")
    script.say("one, two")
    expect(page.locator(".answer")).to_contain_text("one, two")
    page.route("**/health", lambda route: route.abort())
    script.lose()
    expect(page.locator(".answer [role=alert]")).to_contain_text("The answer broke off")
    expect(page.locator(".composer [role=alert]", has_text="cannot be reached")).to_be_visible()
    page.unroute("**/health")
    expect(page.locator(".composer [role=alert]")).to_have_count(0)
    page.get_by_role("button", name="Go on").click()
    script.say(", three, four")
    script.end()
    expect(page.locator(".answer .markdown")).to_have_text("one, two, three, four")
    first, second = script.bodies()
    assert second["messages"] == [*first["messages"], {"role": "assistant", "content": "one, two"}]
    assert second["continue_final_message"] is True


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    page.keyboard.type("What is 1 + 1?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Tell me.")
    page.keyboard.press("Enter")
    expect(page.locator(".question")).to_have_text("What is 1 + 1?\nTell me.")
    expect(page.locator(".figures")).to_have_count(1)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".turn")).to_have_count(0)
    page.keyboard.press("Control+K")
    expect(page.get_by_label("Search in conversations")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_have_count(0)
    page.keyboard.press("Shift+Escape")
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "tab":
            break
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Engine")).to_have_attribute("aria-selected", "true")


def test_the_engine_tab_tells_of_the_model_and_draws_the_metrics(page: Page, server: Served) -> None:
    page.get_by_role("tab", name="Engine").click()
    facts = page.locator(".facts:not(.store)")
    expect(facts).to_contain_text("2,048 tokens")
    expect(facts.get_by_role("heading", name="kvern-1m")).to_be_visible()
    expect(facts.locator(".adapters")).to_contain_text("gull")
    expect(page.locator(".chart")).to_have_count(10)
    client = server.client()
    client.completions.create(model="kvern-1m", prompt="Once", max_tokens=300, extra_body={"ignore_eos": True})
    rate = page.locator(".chart", has_text="Generated tokens/s")
    expect(rate.locator("path.line")).to_have_attribute("d", re.compile("L"))
    between = page.locator(".chart", has_text="Between tokens").locator("strong").first
    expect(between).to_contain_text(re.compile("[mµ]s"))
    expect(page.locator(".totals", has_text="tokens generated")).to_contain_text(re.compile(r"[1-9]"))
    expect(page.locator(".verdict")).to_contain_text("of the time", timeout=30_000)
    parts = page.locator(".parts", has_text="Decode steps")
    expect(parts.locator("tr", has_text="attention")).to_contain_text(re.compile("[mµ]s.*%"))
    store = page.locator(".store", has_text="KV tier: host")
    expect(store.locator("div", has_text="state")).to_have_text("stateon")
    expect(store.locator("div", has_text="tokens stored")).to_contain_text(re.compile("[1-9]"))
    expect(store.locator("div", has_text="a load takes")).to_contain_text(re.compile(r"[µm]s \+ .* GB/s"))


TOOLS = json.dumps([{"name": "look", "description": "Looks it up", "parameters": {"type": "object"}}])


def test_thoughts_calls_and_their_results(browser: Browser, server: Served) -> None:
    with opened(browser, **PHONE) as context:
        page = context.new_page()
        page.goto(address(server))
        page.get_by_role("button", name="Settings").tap()
        page.get_by_label("Tools, a JSON list").fill("[")
        ask(page, "What is granite?")
        expect(page.get_by_role("alert")).to_contain_text("Settings, Tools, a JSON list: this is no JSON")
        page.get_by_label("Tools, a JSON list").fill(TOOLS)
        page.get_by_role("button", name="Settings").tap()
        script = Script(page)
        page.get_by_role("button", name="Answer again").tap()
        script.say(reasoning_content="A tool knows **more**.")
        expect(page.get_by_role("button", name="Thinking…")).to_be_visible()
        call = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": '{"word": "granite"}'}}
        script.say(tool_calls=[call])
        script.end()
        expect(page.locator(".call")).to_contain_text('"word": "granite"')
        page.get_by_role("button", name="Thoughts").tap()
        expect(page.locator(".thinking strong")).to_have_text("more")
        page.get_by_label("Result of look").fill("a stone")
        page.get_by_role("button", name="Send the results").tap()
        script.say("It is a stone.")
        script.end()
        expect(page.locator(".answer .markdown", has_text="It is a stone.")).to_be_visible()
        expect(page.locator(".call", has_text="result of look")).to_contain_text("a stone")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        messages = script.bodies()[1]["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[1]["reasoning_content"] == "A tool knows **more**."
        page.reload()
        expect(page.locator(".turn")).to_have_count(2)
        with page.expect_response("**/v1/chat/completions") as answered:  # the server takes what the page sends
            page.get_by_role("button", name="Answer again").last.tap()
        assert answered.value.status == 200
        expect(page.locator(".turn").last.locator(".versions")).to_contain_text("2/2")


def test_thinking_can_be_switched_where_the_model_thinks(page: Page) -> None:
    expect(page.get_by_label("Thinking")).to_have_count(0)

    def thinks(route: Route) -> None:
        facts = {"capabilities": ["completion", "thinking"], "details": {}, "model_info": {}}
        route.fulfill(json=facts)

    page.route("**/api/show", thinks)
    page.reload()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Effort").select_option("low")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is 1 + 1?")
    assert sent.value.post_data_json["reasoning_effort"] == "low"
    expect(page.locator(".answer")).to_contain_text(re.compile("This model's chat template cannot .*set an effort"))
    page.get_by_label("Thinking").select_option("off")
    expect(page.get_by_label("Effort")).to_be_disabled()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Answer again").click()
    body = sent.value.post_data_json
    assert (body["enable_thinking"], "reasoning_effort" in body) == (False, False)


def test_an_answer_of_a_schema(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answer as JSON of this schema").fill('{"enum": [{"colour": "green"}]}')
    ask(page, "Which colour?")
    expect(page.locator(".answer pre")).to_have_text('{\n  "colour": "green"\n}')


def test_adapters_can_be_chosen(page: Page) -> None:
    expect(page.locator("optgroup[label=Adapters] option")).to_have_text(["gull"])
    page.get_by_label("Model").select_option("gull")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is 1 + 1?")
    assert sent.value.post_data_json["model"] == "gull"
    expect(page.locator(".figures")).to_contain_text("tokens")


def test_several_models_are_shown_with_their_states_of_the_moment_in_which_one_is_chosen(page: Page) -> None:
    states = {"chat": "awake", "small": "cold"}

    def of_several(route: Route) -> None:
        listed = route.fetch().json()
        [first] = [entry for entry in listed["data"] if not entry["parent"]]
        route.fulfill(json=listed | {"data": [first | {"id": name, "state": state} for name, state in states.items()]})

    page.route("**/v1/models", of_several)
    page.route("**/api/show", lambda route: route.fulfill(json={"capabilities": [], "details": {}, "model_info": {}}))
    options = page.get_by_label("Model").locator("option")
    expect(options.first).to_have_text("kvern-1m")
    page.reload()
    expect(options).to_have_text(["chat (awake)", "small (cold)"])
    states |= {"chat": "asleep", "small": "awake"}
    page.get_by_label("Model").focus()
    expect(options).to_have_text(["chat (asleep)", "small (awake)"])
    page.get_by_label("Question").focus()
    states["chat"] = "cold"
    page.get_by_label("Model").hover()
    expect(options).to_have_text(["chat (cold)", "small (awake)"])


@pytest.mark.nightly
def test_a_model_of_a_path_is_shown_by_its_last_part(page: Page) -> None:
    path = "/home/someone/Downloads/model-Q4_K_M.gguf"

    def of_a_file(route: Route) -> None:
        listed = route.fetch().json()
        first = listed["data"][0] | {"id": path, "root": path}
        route.fulfill(json=listed | {"data": [first]})

    page.route("**/v1/models", of_a_file)
    page.route("**/api/show", lambda route: route.fulfill(json={"capabilities": [], "details": {}, "model_info": {}}))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "no"}}))
    page.reload()
    expect(page.get_by_role("heading", name="model-Q4_K_M.gguf")).to_have_text("model-Q4_K_M.gguf")
    expect(page.get_by_label("Model")).to_have_value(path)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is 1 + 1?")
    assert sent.value.post_data_json["model"] == path
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator(".facts:not(.store) h2")).to_have_text("model-Q4_K_M.gguf")
    expect(page.locator(".facts:not(.store)")).to_contain_text(path)


def test_enter_sends_all_that_was_typed_before_it(page: Page) -> None:
    """Also a letter that has not been drawn."""
    say(page, "Yes.")
    type_at_once = """field => {
        const set = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set;
        set.call(field, "Is it so?");
        field.dispatchEvent(new Event("input", { bubbles: true }));
        field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    }"""
    field = page.get_by_label("Question", exact=True)
    with page.expect_request("**/v1/chat/completions") as sent:
        field.evaluate(type_at_once)
    assert sent.value.post_data_json["messages"][-1]["content"] == "Is it so?"
    expect(field).to_have_value("")


def test_a_question_may_be_asked_before_conversations_are_read(page: Page) -> None:
    page.add_init_script("""
        const open = IDBFactory.prototype.open;
        const opened = new Promise((resolve) => { window.letOpen = resolve; });
        IDBFactory.prototype.open = function (...given) {
            const request = open.apply(this, given);
            const set = (done) => request.addEventListener("success", (event) => opened.then(() => done(event)));
            return Object.defineProperty(request, "onsuccess", { set });
        };
    """)
    page.reload()
    say(page, "Yes.")
    ask(page, "Is it so?")
    expect(page.locator(".question")).to_have_text("Is it so?")
    page.evaluate("letOpen()")
    expect(page.get_by_role("link", name="Is it so?")).to_be_visible()
    expect(page.locator(".answer .markdown")).to_have_text("Yes.")
    expect(page.locator(".question")).to_have_text("Is it so?")


def test_text_files_go_along(page: Page) -> None:
    files: Any = page.get_by_label("Text files", exact=True)
    files.set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x00\xff"})
    expect(page.get_by_role("alert")).to_contain_text("a.png was left out: kvern-1m reads no pictures")
    files.set_input_files({"name": "a.bin", "mimeType": "application/x", "buffer": b"\xff\x00"})
    expect(page.get_by_role("alert")).to_contain_text("a.bin was left out: it is no text in UTF-8")
    files.set_input_files({"name": "big.txt", "mimeType": "text/plain", "buffer": b"a" * 1_100_000})
    expect(page.get_by_role("alert")).to_contain_text("big.txt was left out")
    files.set_input_files({"name": "long.txt", "mimeType": "text/plain", "buffer": b"hello " * 2100})
    expect(page.get_by_role("alert")).to_contain_text("take a file away")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_role("button", name="Take long.txt away").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    files.set_input_files({"name": "notes.md", "mimeType": "text/markdown", "buffer": b"```\ncode\n```"})
    expect(page.locator(".context")).to_contain_text("of 2,048 tokens")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What does it say?")
    (message,) = sent.value.post_data_json["messages"]
    assert message["content"] == "notes.md\n````\n```\ncode\n```\n````\n\nWhat does it say?"
    expect(page.locator(".turn .files")).to_contain_text("notes.md")


def test_without_the_key_there_is_no_page(browser: Browser, server: Served) -> None:
    status, headers, _ = server.raw("GET", "/page.js", key=None)
    assert (status, headers["www-authenticate"][:5]) == (401, "basic")
    with opened(browser) as context:
        page = context.new_page()
        page.goto(address(server))
        for kind, status in (("application/json", 200), ("text/plain", 401)):  # a form of another site's page
            script = """async (kind) => (await fetch('tokenize', {method: 'POST', body: '{"prompt": "a"}',
                headers: {'content-type': kind}})).status"""
            assert page.evaluate(script, kind) == status
