"""Takes the documentation's pictures of the chat page and `kvern top`: python -m tests.support.page_pictures

With the folder of a model of `training.pictures` it takes that of a conversation about a picture, which it answers.
"""

import io
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from training.draw import Draw
from training.pictures import FIRST, Scene, is_new, paint

from kvern.cli.remote import RemoteServer
from kvern.cli.top import Top
from tests.support.chat_page import ARGUMENTS, CHROMIUM, address, ask, opened, say
from tests.support.served import PATIENCE, Served, serving

IMAGES = Path(__file__).parents[2] / "docs/images"
DESKTOP: Any = {"viewport": {"width": 1200, "height": 880}}
SMALL: Any = {"viewport": {"width": 900, "height": 700}}
PHONE: Any = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}
TITLES = ("Names for a bakery", "Why is the sky blue?", "A letter to the landlord", "Tell me a story about a fox.")
ANSWER = r"""Attention weighs all tokens with one softmax:

$$\operatorname{Attention}(Q, K, V) = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V$$

| tokens | scores | memory in 16 bits |
|--:|--:|--:|
| 1 024 | 1.0 million | 2 MiB |
| 8 192 | 67 million | 128 MiB |

```python
def attention(query, key, value):
    scores = query @ key.T / math.sqrt(query.shape[-1])
    return softmax(scores) @ value  # one row a token
```
"""


def conversation(page: Page, question: str, answer: str) -> None:
    page.evaluate("location.hash = '#chat'")
    expect(page.locator(".turn")).to_have_count(0)
    say(page, answer)
    ask(page, question)
    expect(page.locator(".figures")).to_have_count(1)


def fill(page: Page) -> None:
    """Conversations for the list, and one with all kinds of content."""
    for title in TITLES:
        conversation(page, title, "An answer.")
    page.evaluate("location.hash = '#chat'")
    expect(page.locator(".turn")).to_have_count(0)
    page.unroute("**/v1/chat/completions")
    ask(page, "What is paged attention?")
    expect(page.locator(".figures")).to_have_count(1)
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".versions")).to_contain_text("2/2")
    say(page, ANSWER, 61, 214)
    ask(page, "How is it computed?")
    expect(page.locator(".figures")).to_have_count(2)
    page.locator("math").first.wait_for()
    figures = page.locator(".figures").last
    figures.evaluate("figures => figures.replaceChildren()")  # no model has written this answer: it has no figures


def take(page: Page, name: str) -> None:
    page.mouse.move(0, 0)
    page.screenshot(path=IMAGES / f"{name}.png", animations="disabled")


def busy(server: Served) -> None:
    """Let the engine answer several requests at once, three times, so that its figures show something."""
    bodies = [{"prompt": f"Once {number}", "max_tokens": 300, "ignore_eos": True} for number in range(4)]
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            for status in pool.map(
                lambda body: server.raw("POST", "/v1/completions", json.dumps(body).encode())[0], bodies
            ):
                assert status == 200


def picture_of_top(server: Served) -> None:
    """What `kvern top` shows of a server that works, without the fonts of others."""
    top = Top(RemoteServer(address(server).rstrip("/"), timeout=PATIENCE))
    while "tokens" not in "".join(top.lines()) and "requests a step" not in "".join(top.lines()):
        time.sleep(1)
        top.look()
    console = Console(record=True, file=io.StringIO(), width=104, markup=False, highlight=False)
    console.print(*top.tables(), *top.lines(), sep="")
    form = re.sub(r"@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(IMAGES / "kvern-top.svg"), title="kvern top", code_format=form, unique_id="top")


def pictures(browser: Browser, server: Served) -> None:
    with opened(browser, color_scheme="light", **DESKTOP) as context:
        page = context.new_page()
        page.goto(address(server))
        fill(page)
        take(page, "chat-page")
        page.emulate_media(color_scheme="dark")
        page.get_by_role("tab", name="Engine").click()
        expect(page.locator(".chart")).to_have_count(10)
        with ThreadPoolExecutor() as pool:
            works = pool.submit(busy, server)
            picture_of_top(server)
            works.result()
        page.wait_for_timeout(2500)  # two more readings
        take(page, "chat-page-engine")
    with opened(browser, color_scheme="light", **PHONE) as context:
        page = context.new_page()
        page.goto(address(server))
        fill(page)
        page.locator(".question").last.evaluate("question => question.scrollIntoView()")
        page.locator(".to-end").wait_for(state="hidden")
        take(page, "chat-page-phone")


SEEN = Scene((("yellow", "triangle"), ("green", "square")), "blue")


def picture_of_shapes(browser: Browser, server: Served) -> None:
    """A conversation about a picture, with the model's own answers; training showed it no such picture."""
    assert is_new(SEEN), "the model has seen this combination"
    drawn = io.BytesIO()
    paint(SEEN, Draw("the page"), 400).save(drawn, "PNG")
    with opened(browser, color_scheme="light", **SMALL) as context:
        page = context.new_page()
        page.goto(address(server))
        shapes: Any = {"name": "shapes.png", "mimeType": "image/png", "buffer": drawn.getvalue()}
        page.get_by_label("Pictures", exact=True).set_input_files(shapes)
        background = "Which colour is the background?"
        for number, (question, answer) in enumerate([(FIRST[0], str(SEEN)), (background, SEEN.answers()[background])]):
            ask(page, question)
            expect(page.locator(".figures")).to_have_count(number + 1)
            assert page.locator(".answer .markdown").last.inner_text() == answer
        page.locator(".scroller").evaluate("box => (box.scrollTop = 0)")
        take(page, "chat-page-picture")


def main() -> None:
    assert CHROMIUM is not None, "Chromium is needed"
    greedy = ("--override-generation-config", '{"temperature": 0}')
    model = ("--model", sys.argv[1], "--served-model-name", "tiny-shapes", *greedy) if sys.argv[1:] else ()
    with serving("--threads", "1", *model) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        (picture_of_shapes if model else pictures)(browser, server)
        browser.close()


if __name__ == "__main__":
    main()
