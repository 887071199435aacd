"""Hands and eyes for the chat page: how tests open it, ask, and script answers."""

import json
import shutil
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Route

from tests.support.served import KEY, PATIENCE, Served

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
PHONE: Any = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}


def address(server: Served) -> str:
    return f"http://{server.host}:{server.port}/"


def opened(browser: Browser, **options: Any) -> BrowserContext:
    """A browser's window with storage of its own, for somebody who has typed the key."""
    credentials: Any = {"username": "me", "password": KEY}
    context = browser.new_context(http_credentials=credentials, **options)
    context.set_default_timeout(PATIENCE * 1000)
    return context


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")


def say(page: Page, text: str, prompt: int = 30, tokens: int = 12) -> None:
    """Let the next answers be this text of so many tokens, as the server would stream it."""

    def answer(route: Route) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}], "usage": usage}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answer)


SCRIPT = """() => {
    const real = window.fetch;
    const encoder = new TextEncoder();
    window.script = { bodies: [] };
    window.fetch = async (path, options) => {
        if (path !== "v1/chat/completions") return real(path, options);
        script.bodies.push(JSON.parse(options.body));
        return new Response(new ReadableStream({ start(controller) {
            const send = (data) => controller.enqueue(encoder.encode(`data: ${data}\\n\\n`));
            script.say = (delta, more = {}) => send(JSON.stringify({ choices: [{ index: 0, delta }], ...more }));
            script.end = () => { send("[DONE]"); controller.close(); };
            script.lose = () => controller.error(new TypeError("network error"));
            options.signal.addEventListener("abort", () => controller.error(new DOMException("", "AbortError")));
        } }));
    };
}"""


class Script:
    """Answers of a page that come piece by piece, when the test says so."""

    def __init__(self, page: Page) -> None:
        self._page = page
        page.evaluate(SCRIPT)

    def bodies(self) -> list[Any]:
        """The requests that the page has sent."""
        found: list[Any] = self._page.evaluate("script.bodies")
        return found

    def say(self, text: str = "", **more: Any) -> None:
        """Send one chunk: text of the answer, or other fields of its delta."""
        self._page.evaluate("delta => script.say(delta)", ({"content": text} if text else {}) | more)

    def end(self) -> None:
        """End the answer, once it has been asked for."""
        self._page.wait_for_function("() => Boolean(script.end)")
        self._page.evaluate("script.end()")

    def lose(self) -> None:
        """Break the connection in the middle of the answer."""
        self._page.evaluate("script.lose()")
