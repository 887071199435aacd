"""One server and one browser for all tests of the chat page."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.chat_page import ARGUMENTS, CHROMIUM, address, opened
from tests.support.served import KEY, PATIENCE, Served, serving
from tests.support.trained_adapters import ADAPTERS

ANSWERED = ("400 (Bad Request)", "net::ERR_FAILED", "net::ERR_CONNECTION_REFUSED")
"""What the browser's console says of requests whose failure the page tells in words."""


@pytest.fixture(scope="package")
def server() -> Iterator[Served]:
    options = (
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--kv-tier",
        "host:64MB",
        "--trace-layers",
        "20",
    )
    with serving("kvern-1m", "--api-key", KEY, *options, "--adapter", f"gull={ADAPTERS['gull']}") as served:
        yield served


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


@contextlib.contextmanager
def watched(browser: Browser, server: Served) -> Iterator[Page]:
    """The page, as somebody sees it who has typed the key; nothing may go wrong in it or leave the server."""
    with opened(browser) as context:
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address(server))
        yield page
        assert not [text for text in wrong if not any(known in text for known in ANSWERED)]
        assert all(url.startswith((address(server), f"blob:{address(server)}", "data:image/")) for url in asked)


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with watched(browser, server) as page:
        yield page
