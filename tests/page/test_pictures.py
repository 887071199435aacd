"""Pictures on the chat page, in a real browser with a model that sees: attached, pasted, dropped, kept, and refused."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import watched
from tests.support.chat_page import Script, address, ask, opened, say
from tests.support.served import Served, serving
from tests.support.vision_models import make_vision_model, picture


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def file(name: str, content: bytes, kind: str = "image/png") -> Any:
    return {"name": name, "mimeType": kind, "buffer": content}


SMALL = saved(picture(60, 40))
URL = f"data:image/png;base64,{base64.b64encode(SMALL).decode()}"
SHOWN = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_vision_model("mistral3", tmp_path_factory.mktemp("sees") / "model")
    options = ("--threads", "1", "--dtype", "float32", "--max-model-len", "512", "--served-model-name", "sees")
    with serving("--model", str(folder), *options) as served:
        yield served


@pytest.fixture
def page(browser: Browser, sees: Served) -> Iterator[Page]:
    with watched(browser, sees) as page:
        expect(page.get_by_role("button", name="Attach pictures")).to_be_visible()
        yield page


def attach(page: Page, *files: Any) -> None:
    page.get_by_label("Pictures", exact=True).set_input_files(list(files))


def thumbnails(page: Page, where: str) -> Any:
    return page.locator(f"{where} .picture img")


def is_seen(image: Any) -> bool:
    """Whether the browser shows the picture itself."""
    return bool(image.evaluate("async (image) => (await image.decode(), image.naturalWidth > 0)"))


ARRIVE = """([name, kind, content, event, target]) => {
    const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], name, { type: kind }));
    const options = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
    const Kind = event === "paste" ? ClipboardEvent : DragEvent;
    document.querySelector(target).dispatchEvent(new Kind(event, options));
}"""


def arrive(page: Page, event: str, target: str, name: str) -> None:
    page.evaluate(ARRIVE, [name, "image/png", base64.b64encode(SMALL).decode(), event, target])


def test_a_picture_is_attached_sent_kept_and_sent_again(page: Page, sees: Served) -> None:
    attach(page, file("noise.png", SMALL))
    waiting = thumbnails(page, ".composer")
    expect(waiting).to_have_attribute("alt", "noise.png, 60 × 40 pixels")
    assert is_seen(waiting)
    expect(page.locator(".context")).to_contain_text("of 512 tokens")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "what is this")
    [message] = sent.value.post_data_json["messages"]
    assert message["content"] == [SHOWN, {"type": "text", "text": "what is this"}]
    expect(thumbnails(page, ".composer")).to_have_count(0)
    expect(page.locator(".figures")).to_contain_text("prompt")
    messages: Any = [message]
    expected = sees.client().chat.completions.create(model="sees", messages=messages, max_tokens=1)
    assert expected.usage is not None
    expect(page.locator(".figures")).to_contain_text(f"prompt {expected.usage.prompt_tokens}")
    page.reload()
    assert is_seen(thumbnails(page, ".turn"))
    say(page, "an answer")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Answer again").click()
    assert sent.value.post_data_json["messages"] == [message]
    expect(page.locator(".answer .markdown")).to_have_text("an answer")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "and now")
    answered = {"role": "assistant", "content": "an answer"}
    assert sent.value.post_data_json["messages"] == [message, answered, {"role": "user", "content": "and now"}]


def test_pictures_are_pasted_dropped_and_taken_away(page: Page) -> None:
    arrive(page, "paste", "[aria-label=Question]", "pasted.png")
    arrive(page, "drop", "main", "dropped.png")  # before the first one is read
    expect(thumbnails(page, ".composer")).to_have_count(2)
    page.get_by_role("button", name="Take pasted.png away").click()
    expect(thumbnails(page, ".composer")).to_have_attribute("alt", "dropped.png, 60 × 40 pixels")
    files: Any = page.get_by_label("Text files", exact=True)
    files.set_input_files([file("a.txt", b"a text", "text/plain"), file("b.png", SMALL)])
    expect(thumbnails(page, ".composer")).to_have_count(2)
    script = Script(page)
    page.get_by_role("button", name="Send").click()
    script.end()
    [body] = script.bodies()
    assert body["messages"] == [
        {"role": "user", "content": [SHOWN, SHOWN, {"type": "text", "text": "a.txt\n```\na text\n```"}]}
    ]
    expect(page.locator(".list a > span")).to_have_text("dropped.png")


@pytest.mark.nightly
def test_an_edited_question_keeps_its_picture_or_loses_it(page: Page) -> None:
    attach(page, file("noise.png", SMALL))
    say(page, "first")
    ask(page, "what is this")
    expect(page.locator(".answer .markdown")).to_have_text("first")

    def edited(*keys: str) -> Any:
        page.locator(".turn").hover()
        page.get_by_role("button", name="Edit the question").click()
        if keys:
            page.locator(".edited").get_by_role("button", name="Take noise.png away").click()
        page.get_by_label("The question, edited").fill("and this")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.keyboard.press("Enter")
        return sent.value.post_data_json["messages"][0]["content"]

    assert edited() == [SHOWN, {"type": "text", "text": "and this"}]
    expect(page.locator(".of-question .versions")).to_contain_text("2/2")
    assert edited("away") == "and this"
    expect(thumbnails(page, ".turn")).to_have_count(0)
    page.get_by_role("button", name="Former question").click()
    assert is_seen(thumbnails(page, ".turn"))


def test_pictures_go_with_exports_and_deleted_conversations(
    page: Page, browser: Browser, sees: Served, tmp_path: Path
) -> None:
    attach(page, file("noise.png", SMALL))
    say(page, "first")
    ask(page, "what is this")
    expect(page.locator(".answer .markdown")).to_have_text("first")
    count = """() => new Promise((resolve) => {
        indexedDB.open("kvern").onsuccess = ({ target }) => {
            target.result.transaction("pictures").objectStore("pictures").count().onsuccess = (event) => {
                target.result.close();
                resolve(event.target.result);
            };
        };
    })"""

    def kept(expected: int) -> None:
        """Wait for what the page writes, which comes a little later."""
        for _ in range(200):
            if page.evaluate(count) == expected:
                return
            page.wait_for_timeout(50)
        raise AssertionError(f"{page.evaluate(count)} pictures are kept, not {expected}")

    kept(1)
    page.get_by_role("button", name="Delete what is this").click()
    expect(page.locator(".list a")).to_have_count(0)
    kept(0)  # nothing is left of a deleted conversation
    page.get_by_role("button", name="Undo").click()
    kept(1)
    expect(page.locator(".turn")).to_have_count(1)  # it is open again, as the address says then
    page.reload()
    assert is_seen(thumbnails(page, ".turn"))
    with page.expect_download() as saved_file:
        page.get_by_role("button", name="Export").click()
    exported = tmp_path / "exported.json"
    saved_file.value.save_as(exported)
    content = json.loads(exported.read_text())
    [conversation] = content["conversations"]
    assert [one["data"] for one in conversation["pictures"]] == [URL]
    with opened(browser) as context:
        other = context.new_page()
        other.goto(address(sees))
        chosen = other.get_by_label("File of conversations")
        for data in ("https://outside.example/a.png", "data:image/svg+xml;base64,AAAA", 'data:image/png;base64,"'):
            bad = content | {"conversations": [conversation | {"pictures": [{"id": "a", "data": data}]}]}
            chosen.set_input_files(file("x.json", json.dumps(bad).encode(), "application/json"))
            expect(other.locator(".notice")).to_contain_text("a picture of “what is this” has no id or no data")
        chosen.set_input_files(exported)
        expect(other.locator(".notice")).to_contain_text("1 conversation imported.")
        other.get_by_role("link", name="what is this").click()
        assert is_seen(thumbnails(other, ".turn"))
        without = content | {"conversations": [conversation | {"id": "b", "pictures": []}]}
        without["conversations"][0]["turns"][0] |= {"id": "c", "files": [{"name": "lost.png", "picture": "d"}]}
        chosen.set_input_files(file("y.json", json.dumps(without).encode(), "application/json"))
        expect(other.locator(".list a")).to_have_count(2)


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        ("a.png", b"no picture", "image/png", "a.png was left out: the browser cannot read it as a picture"),
        (
            "a.bmp",
            saved(picture(4, 4), "BMP"),
            "image/bmp",
            "image/bmp is not read. Pictures are JPEG, PNG, WebP or GIF",
        ),
        ("long.png", saved(picture(1, 202)), "image/png", "it has 1 × 202 pixels, and the longer side may have 200"),
        ("a.bin", b"\0\1", "application/x", "a.bin was left out: it is no text in UTF-8, and no picture."),
    ],
)
def test_what_cannot_be_sent_is_named_before(page: Page, name: str, content: bytes, kind: str, said: str) -> None:
    attach(page, file(name, content, kind), file("good.png", SMALL))
    expect(page.locator(".composer [role=alert]", has_text=said)).to_be_visible()
    expect(thumbnails(page, ".composer")).to_have_attribute("alt", "good.png, 60 × 40 pixels")


def test_a_conversation_takes_as_many_pictures_as_the_server(page: Page) -> None:
    attach(page, *[file(f"{number}.png", SMALL) for number in range(31)])
    expect(thumbnails(page, ".composer")).to_have_count(31)
    say(page, "seen")
    ask(page, "what")
    expect(page.locator(".answer .markdown")).to_have_text("seen")
    attach(page, *[file(f"{number}.png", SMALL) for number in (31, 32)])
    left_out = "32.png was left out: a conversation has at most 32 pictures."
    expect(page.locator(".composer [role=alert]", has_text=left_out)).to_be_visible()
    expect(thumbnails(page, ".composer")).to_have_count(1)


@pytest.mark.nightly
def test_a_large_picture_is_reduced_and_a_body_has_an_end(page: Page) -> None:
    large = saved(picture(1400, 1050))  # noise: 4.4 MB
    wide = saved(picture(1, 1).resize((17000, 500)))
    assert len(large) > 4 << 20
    attach(page, file("large.png", large), file("wide.png", wide))
    expect(page.locator(".composer .picture .size")).to_have_text(
        ["1,400 × 1,050, sent as a JPEG of 1,400 × 1,050", "17,000 × 500, sent as a JPEG of 2,048 × 60"]
    )
    script = Script(page)
    ask(page, "what")
    script.end()
    [first, second, _] = script.bodies()[0]["messages"][0]["content"]
    for part, size in ((first, (1400, 1050)), (second, (2048, 60))):
        head, _, data = part["image_url"]["url"].partition(",")
        assert head == "data:image/jpeg;base64" and Image.open(io.BytesIO(base64.b64decode(data))).size == size
    just = saved(picture(1150, 1150))  # 4.0 MB, as it is
    attach(page, *[file(f"{number}.png", just) for number in range(3)])
    expect(
        page.locator(".composer [role=alert]", has_text="2.png was left out: a request holds 15.0 MiB of")
    ).to_be_visible()
    expect(thumbnails(page, ".composer")).to_have_count(2)


@pytest.mark.nightly
def test_a_full_storage_keeps_pictures_until_the_page_goes(page: Page) -> None:
    page.evaluate("""() => {
        IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
    }""")
    attach(page, file("noise.png", SMALL))
    say(page, "an answer")
    ask(page, "what")
    expect(page.locator(".notice")).to_contain_text("The browser's storage is full")
    assert is_seen(thumbnails(page, ".turn"))
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Answer again").click()
    assert sent.value.post_data_json["messages"][0]["content"][0] == SHOWN


@pytest.mark.nightly
def test_a_lost_picture_is_told(page: Page) -> None:
    attach(page, file("noise.png", SMALL))
    say(page, "an answer")
    ask(page, "what")
    expect(page.locator(".answer .markdown")).to_have_text("an answer")
    page.evaluate("""() => new Promise((resolve) => {
        indexedDB.open("kvern").onsuccess = ({ target }) => {
            const clearing = target.result.transaction("pictures", "readwrite");
            clearing.objectStore("pictures").clear();
            clearing.oncomplete = () => { target.result.close(); resolve(); };
        };
    })""")
    page.reload()
    expect(page.locator(".turn .picture")).to_contain_text("noise.png is not in this browser any more")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer [role=alert]")).to_contain_text("attach it again or take it away")


OLD = """() => new Promise((resolve) => {
    const request = indexedDB.open("kvern", 1);
    request.onupgradeneeded = () => {
        const make = (name) => request.result.createObjectStore(name, { keyPath: "id" });
        make("conversations").put({ id: "a", title: "An old one", created: 1, changed: 1, leaf: "b" });
        make("turns").createIndex("conversation", "conversation");
        const turn = { id: "b", conversation: "a", parent: null, asked: "b", question: "old?", state: "done" };
        request.transaction.objectStore("turns").put({ ...turn, answer: "an old answer", created: 1 });
    };
    request.onsuccess = () => { request.result.close(); resolve(); };
})"""


@pytest.mark.nightly
def test_conversations_of_an_older_page_stay(browser: Browser, sees: Served) -> None:
    with opened(browser) as context:
        page = context.new_page()
        page.goto(address(sees) + "icon.svg")
        page.evaluate(OLD)
        page.goto(address(sees))
        page.get_by_role("link", name="An old one").click()
        expect(page.locator(".answer .markdown")).to_have_text("an old answer")
        attach(page, file("noise.png", SMALL))
        say(page, "seen")
        ask(page, "what")
        expect(page.locator(".answer .markdown").last).to_have_text("seen")
        page.reload()
        assert is_seen(thumbnails(page, ".turn"))


def test_a_model_that_reads_text_alone_takes_no_pictures(browser: Browser, server: Served) -> None:
    with watched(browser, server) as page:
        expect(page.get_by_role("button", name="Attach text files")).to_be_visible()
        expect(page.get_by_label("Model", exact=True)).to_have_value("kvern-1m")
        expect(page.get_by_role("button", name="Attach pictures")).to_have_count(0)
        arrive(page, "paste", "[aria-label=Question]", "pasted.png")
        left_out = "pasted.png was left out: kvern-1m reads no pictures"
        expect(page.locator(".composer [role=alert]", has_text=left_out)).to_be_visible()
        expect(thumbnails(page, ".composer")).to_have_count(0)
