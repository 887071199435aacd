"""The shape of the chat page: light and dark, a phone's width, and what axe says of its accessibility."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.chat_page import PHONE, address, ask, opened, say
from tests.support.served import Served

AXE = Path(__file__).parents[2] / "web/node_modules/axe-core/axe.min.js"
LONG = "Averylongword" * 20
ANSWER = f"""## Everything

A [link](https://outside.example/a), `code`, **bold**, $E = mc^2$ and {LONG}.

| left | right |
|:--|--:|
| {LONG} | 1.25 |

```python
print("{LONG}")  # a comment
```

$$\\sum_{{i=0}}^{{n}} a_i + b_i + c_i + d_i + e_i + f_i + g_i + h_i + j_i + k_i + l_i + m_i + n_i + o_i = 0$$

> A quote
"""


def filled(page: Page) -> None:
    """A conversation with all that an answer may hold, and a list of several."""
    say(page, ANSWER)
    for question in (LONG, "Show everything"):
        page.evaluate("location.hash = '#chat'")
        expect(page.locator(".turn")).to_have_count(0)
        ask(page, question)
        expect(page.locator(".figures")).to_have_count(1)


def test_a_phone_does_not_scroll_sideways(browser: Browser, server: Served) -> None:
    with opened(browser, **PHONE) as context:
        page = context.new_page()
        page.goto(address(server))

        def fits() -> bool:
            return bool(page.evaluate("document.documentElement.scrollWidth <= 360 && scrollX === 0"))

        assert fits()
        filled(page)
        wide = "box => box.scrollWidth <= box.clientWidth"
        assert fits()
        assert page.locator(".scroller").evaluate(wide)
        page.get_by_role("button", name="Settings").tap()
        assert fits()
        page.get_by_role("button", name="Settings").tap()
        page.get_by_role("button", name="Conversations", exact=True).tap()
        expect(page.get_by_role("navigation", name="Conversations")).to_be_visible()
        assert fits()
        page.get_by_role("link", name="Averylongword").tap()
        expect(page.get_by_role("navigation", name="Conversations")).to_have_count(0)
        page.get_by_role("tab", name="Engine").tap()
        expect(page.locator(".chart")).to_have_count(10)
        assert fits()
        assert page.locator("#engine").evaluate(wide)


def test_colours_follow_the_system_or_what_is_chosen(browser: Browser, server: Served) -> None:
    def colour(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with opened(browser) as context:
        page = context.new_page()
        page.goto(address(server))
        page.emulate_media(color_scheme="light")
        light = colour(page)
        page.emulate_media(color_scheme="dark")
        dark = colour(page)
        assert dark != light
        page.get_by_role("button", name="Colours: system").click()
        assert colour(page) == light
        page.reload()
        page.get_by_role("button", name="Colours: light").click()
        page.emulate_media(color_scheme="light")
        assert colour(page) == dark


@pytest.mark.sample(1)
@pytest.mark.skipif(not AXE.exists(), reason="web/node_modules has no axe-core: run npm ci in web/")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(browser: Browser, server: Served, scheme: Any) -> None:
    with opened(browser, color_scheme=scheme, reduced_motion="reduce") as context:
        page = context.new_page()
        page.goto(address(server))

        def faults(view: str) -> list[str]:
            found = page.evaluate("async () => (await axe.run({ resultTypes: ['violations'] })).violations")
            return [
                f"{view}: {one['id']} ({one['help']}) {json.dumps([node['html'][:200] for node in one['nodes']])}"
                for one in found
            ]

        expect(page.get_by_label("Model")).to_have_value("kvern-1m")
        page.evaluate(AXE.read_text())
        found = faults("empty")
        filled(page)
        page.get_by_role("button", name="Settings").click()
        page.locator(".turn").hover()
        found += faults("conversation with settings")
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Edit the question").click()
        page.get_by_label("Search in conversations").fill("quote")
        expect(page.locator(".list small").first).to_be_visible()
        found += faults("edit and search")
        page.keyboard.press("Control+/")
        expect(page.get_by_role("dialog")).to_be_visible()
        found += faults("keys")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Delete Show everything").click()
        expect(page.locator(".notice")).to_be_visible()
        found += faults("notice")
        page.get_by_role("tab", name="Engine").click()
        expect(page.locator(".chart")).to_have_count(10)
        found += faults("engine")
        page.set_viewport_size({"width": 360, "height": 640})
        page.get_by_role("tab", name="Chat").click()
        page.get_by_role("button", name="Conversations", exact=True).click()
        found += faults("list on a phone")
        assert not found, "\n".join(found)
