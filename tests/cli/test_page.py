"""The chat page in a real browser, against a real server."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.support.scripted_model import Call, make_scripted_model
from tests.support.served import KEY, PATIENCE, SMALL, Served, eventually, serving
from tests.support.trained_adapters import ADAPTERS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ADAPTER = ADAPTERS["gull"]
QUESTION = "What is paged attention?"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--api-key", KEY, "--threads", "1", "--max-model-len", "2048") as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    """The page, as somebody sees it who has typed the key; nothing may go wrong in it or leave the server."""
    with opened(browser, server) as context:
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://{server.host}:{server.port}/")
        yield page
        assert not [text for text in wrong if "400 (Bad Request)" not in text]  # of which the page tells in words
        assert all(url.startswith(f"http://{server.host}:{server.port}/") for url in asked)


def opened(browser: Browser, server: Served, **options: Any) -> BrowserContext:
    credentials: Any = {"username": "me", "password": KEY}
    context = browser.new_context(http_credentials=credentials, **options)
    context.set_default_timeout(PATIENCE * 1000)
    return context


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")


def say(page: Page, text: str) -> None:
    """Let the next answer be this text, streamed as the server would."""

    def answer(route: Route) -> None:
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)


def test_an_answer_and_its_figures(page: Page, server: Served) -> None:
    ask(page, QUESTION)
    expect(page.locator(".question")).to_have_text(QUESTION)
    figures = page.locator(".figures")
    expect(figures).to_contain_text("tokens/s")
    expect(figures).to_contain_text("first token")
    client = server.client()
    messages: Any = [{"role": "user", "content": QUESTION}]
    expected = client.chat.completions.create(model="kvern-12m", messages=messages, temperature=0)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer")).to_contain_text(expected.choices[0].message.content[:40])
    page.reload()
    expect(page.locator(".answer")).to_contain_text(expected.choices[0].message.content[:40])
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_a_conversation_goes_on(page: Page) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Answer in short.")
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Seed").fill("3")
    for number in (1, 2):
        ask(page, f"What is {number} + 1?")
        expect(page.locator(".figures")).to_have_count(number)
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert (bodies[1]["max_tokens"], bodies[1]["seed"], bodies[1]["model"]) == (12, 3, "kvern-12m")
    assert "temperature" not in bodies[1]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request(page: Page, server: Served, how: str) -> None:
    def long(route: Route) -> None:
        body = route.request.post_data_json | {"ignore_eos": True, "max_tokens": 1900}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", long)
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


def test_markdown_is_shown_and_scripts_are_not_run(page: Page) -> None:
    hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script> [link](javascript:alert(1))'
    say(page, f"**bold** and\n\n```python\nprint(1 < 2)\n```\n\n{hostile}")
    ask(page, "Anything")
    answer = page.locator(".answer .markdown")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("pre code")).to_have_text("print(1 < 2)\n")
    expect(answer.get_by_role("button", name="Copy")).to_be_visible()
    assert answer.locator("img, script").count() == 0
    assert answer.locator("a[href^=javascript]").count() == 0
    assert page.title() not in ("1", "2")


def test_errors_are_told_in_words(page: Page) -> None:
    ask(page, "What is 1 + 1?")
    expect(page.locator(".figures")).to_have_count(1)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("9999999")
    ask(page, "And 2 + 2?")
    expect(page.get_by_role("alert")).to_contain_text("temperature is 9999999")
    expect(page.locator(".question")).to_have_count(2)


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    page.keyboard.type("What is 1 + 1?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Tell me.")
    page.keyboard.press("Enter")
    expect(page.locator(".question")).to_have_text("What is 1 + 1?\nTell me.")
    expect(page.locator(".figures")).to_have_count(1)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "tab":
            break
    else:
        for _ in range(40):
            page.keyboard.press("Shift+Tab")
            if page.evaluate("document.activeElement.getAttribute('role')") == "tab":
                break
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Engine")).to_have_attribute("aria-selected", "true")


def test_the_engine_tab_draws_the_metrics(page: Page, server: Served) -> None:
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator(".chart")).to_have_count(10)
    client = server.client()
    client.completions.create(model="kvern-12m", prompt="Once", max_tokens=300, extra_body={"ignore_eos": True})
    rate = page.locator(".chart", has_text="Generated tokens/s")
    expect(rate.locator("path.line")).to_have_attribute("d", re.compile("L"))
    expect(page.locator(".chart", has_text="Between tokens").locator("strong").first).to_contain_text(
        re.compile("[mµ]s")
    )
    expect(page.locator(".totals", has_text="tokens generated")).to_contain_text(re.compile(r"[1-9]"))


TOOLS = json.dumps([{"name": "look", "description": "Looks it up", "parameters": {"type": "object"}}])


def test_thoughts_calls_and_their_results(browser: Browser, tmp_path: Path) -> None:
    calls = [Call("look", {"word": "granite"}, "A tool knows **more**.")]
    model = make_scripted_model(tmp_path / "model", calls, "I know that.", "It is a stone.")
    phone: Any = {"viewport": {"width": 390, "height": 740}, "has_touch": True, "is_mobile": True}
    with (
        serving(str(model), "--threads", "1", "--max-model-len", "2048") as server,
        opened(browser, server, **phone) as context,
    ):
        page = context.new_page()
        page.goto(f"http://{server.host}:{server.port}/")
        page.get_by_role("button", name="Settings").tap()
        page.get_by_label("Tools, a JSON list").fill("[")
        ask(page, "What is granite?")
        expect(page.get_by_role("alert")).to_contain_text("Settings, Tools, a JSON list: this is no JSON")
        page.get_by_label("Tools, a JSON list").fill(TOOLS)
        page.get_by_role("button", name="Settings").tap()
        page.get_by_role("button", name="Answer again").tap()
        expect(page.locator(".call")).to_contain_text('"word": "granite"')
        page.get_by_role("button", name="Thoughts").tap()
        expect(page.locator(".thinking strong")).to_have_text("more")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.get_by_label("Result of look").fill("a stone")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Go on").tap()
        expect(page.locator(".answer .markdown", has_text="It is a stone.")).to_be_visible(timeout=20_000)
        expect(page.locator(".call")).to_contain_text("a stone")
        messages = sent.value.post_data_json["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[1]["reasoning_content"] == "A tool knows **more**."
        page.reload()
        expect(page.locator(".turn")).to_have_count(2)


def test_an_answer_of_a_schema(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answer as JSON of this schema").fill('{"enum": [{"colour": "green"}]}')
    ask(page, "Which colour?")
    expect(page.locator(".answer pre")).to_have_text('{\n  "colour": "green"\n}')


def test_adapters_can_be_chosen(browser: Browser) -> None:
    with serving(*SMALL, "--adapter", f"gull={ADAPTER}") as server, opened(browser, server) as context:
        page = context.new_page()
        page.goto(f"http://{server.host}:{server.port}/")
        expect(page.locator("optgroup[label=Adapters] option")).to_have_text(["gull"])
        page.get_by_label("Model").select_option("gull")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "What is 1 + 1?")
        assert sent.value.post_data_json["model"] == "gull"
        expect(page.locator(".figures")).to_contain_text("tokens")


def test_dark_and_narrow(browser: Browser, server: Served) -> None:
    colours = []
    for scheme in ("light", "dark"):
        viewport: Any = {"width": 360, "height": 640}
        with opened(browser, server, color_scheme=scheme, viewport=viewport) as context:
            page = context.new_page()
            page.goto(f"http://{server.host}:{server.port}/")
            page.get_by_label("Question", exact=True).wait_for()
            colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert len(set(colours)) == 2


def test_without_the_key_there_is_no_page(browser: Browser, server: Served) -> None:
    status, headers, _ = server.raw("GET", "/page.js", key=None)
    assert (status, headers["www-authenticate"][:5]) == (401, "basic")
    for kind, status in (("application/json", 200), ("text/plain", 401)):  # a form of another site's page
        with opened(browser, server) as context:
            page = context.new_page()
            page.goto(f"http://{server.host}:{server.port}/")
            script = """async (kind) => (await fetch('tokenize', {method: 'POST', body: '{"prompt": "a"}',
                headers: {'content-type': kind}})).status"""
            assert page.evaluate(script, kind) == status
