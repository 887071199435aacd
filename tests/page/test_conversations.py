"""The conversations that the chat page keeps in the browser: their list, their versions, their export, and two tabs."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.chat_page import Script, address, ask, opened, say
from tests.support.served import Served

TITLES = ("The first question", "The second question", "The third question")


CIRCLE = {"id": "a", "title": "x", "turns": [{"id": "b", "parent": "c"}, {"id": "c", "parent": "b"}]}


def begin(page: Page, question: str, answer: str) -> None:
    """A conversation of one turn."""
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    say(page, answer)
    ask(page, question)
    expect(page.locator(".answer .markdown")).to_have_text(answer)
    expect(page.locator(".figures")).to_have_count(1)


def titles(page: Page) -> Any:
    return page.locator(".list a > span")


def test_the_list_renames_deletes_and_searches(page: Page) -> None:
    for number, title in enumerate(TITLES):
        begin(page, title, f"answer {number} about granite" if number else "answer about basalt")
    expect(titles(page)).to_have_text(TITLES[::-1])
    page.get_by_role("button", name=f"Rename {TITLES[2]}").click()
    page.keyboard.type("Stones")
    page.keyboard.press("Enter")
    expect(titles(page).first).to_have_text("Stones")
    search = page.get_by_label("Search in conversations")
    search.fill("BASALT first")
    expect(titles(page)).to_have_text([TITLES[0]])
    expect(page.locator(".list small")).to_contain_text("basalt")
    search.fill("stones")
    expect(titles(page)).to_have_text(["Stones"])
    search.fill("nowhere")
    expect(page.locator(".list")).to_contain_text("No conversation has these words.")
    page.keyboard.press("Escape")
    expect(titles(page)).to_have_count(3)
    page.get_by_role("button", name="Delete Stones").click()
    expect(titles(page)).to_have_count(2)
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".answer .markdown")).to_have_text("answer 2 about granite")
    page.reload()
    expect(titles(page)).to_have_text(["Stones", TITLES[1], TITLES[0]])
    page.get_by_role("link", name=TITLES[0]).click()
    expect(page.locator(".question")).to_have_text(TITLES[0])
    page.go_back()
    expect(page.locator(".question")).to_have_text(TITLES[2])


def test_edited_questions_and_new_answers_are_versions(page: Page) -> None:
    def shown(*expected: str) -> None:
        expect(page.locator(".answer .markdown")).to_have_text(expected)
        expect(page.locator(".figures")).to_have_count(len(expected))

    begin(page, "One?", "first")
    say(page, "then")
    ask(page, "And then?")
    shown("first", "then")
    say(page, "second")
    page.get_by_role("button", name="Answer again").first.click()
    shown("second")
    expect(page.locator(".turn footer .versions")).to_contain_text("2/2")
    page.get_by_role("button", name="Former answer").click()
    shown("first", "then")
    say(page, "edited")
    page.locator(".turn").first.hover()
    page.get_by_role("button", name="Edit the question").first.click()
    page.get_by_label("The question, edited").fill("Two?")
    page.keyboard.press("Enter")
    shown("edited")
    expect(page.locator(".of-question .versions")).to_contain_text("2/2")
    page.reload()
    shown("edited")
    page.get_by_role("button", name="Former question").click()
    expect(page.locator(".question").first).to_have_text("One?")
    expect(page.locator(".turn footer .versions")).to_contain_text("2/2")
    page.get_by_role("button", name="Former answer").click()
    shown("first", "then")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Which?")
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == [
        "One?",
        "first",
        "And then?",
        "then",
        "Which?",
    ]


@pytest.mark.nightly
def test_another_version_leaves_the_view_and_the_focus_where_they_are(page: Page) -> None:
    begin(page, "One?", "first")
    say(page, "second")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".versions")).to_contain_text("2/2")
    say(page, "a long line\n\n" * 60)
    ask(page, "And then?")
    expect(page.locator(".figures")).to_have_count(2)
    page.get_by_role("button", name="Former answer").press("Enter")
    expect(page.locator(".versions")).to_contain_text("1/2")
    later = page.get_by_role("button", name="Later answer")
    later.press("Enter")
    expect(page.locator(".figures")).to_have_count(2)
    expect(later).to_be_focused()
    assert page.locator(".scroller").evaluate("box => box.scrollTop + box.clientHeight < box.scrollHeight - 500")


@pytest.mark.nightly
def test_an_edit_is_left_with_escape(page: Page) -> None:
    begin(page, "One?", "first")
    page.locator(".turn").hover()
    page.get_by_role("button", name="Edit the question").click()
    page.keyboard.type(" or more")
    page.keyboard.press("Escape")
    expect(page.locator(".question")).to_have_text("One?")
    expect(page.get_by_role("button", name="Edit the question")).to_be_focused()


def test_export_and_import(page: Page, browser: Browser, server: Served, tmp_path: Path) -> None:
    for title in TITLES[:2]:
        begin(page, title, "an answer")
    say(page, "another answer")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".versions")).to_contain_text("2/2")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "exported.json"
    saved.value.save_as(file)
    content = json.loads(file.read_text())
    assert [len(one["turns"]) for one in content["conversations"]] == [2, 1]
    with opened(browser) as context:
        other = context.new_page()
        other.goto(address(server))
        chosen = other.get_by_label("File of conversations")
        for text, message in (
            ("{", "was not imported"),
            ("{}", "it is no export of this page"),
            (json.dumps(content | {"conversations": [{"title": "x"}]}), "“x” in it has no id or no turns"),
            (json.dumps(content | {"conversations": [CIRCLE]}), "turns of “x” follow one another in a circle"),
        ):
            chosen.set_input_files({"name": "x.json", "mimeType": "application/json", "buffer": text.encode()})
            expect(other.locator(".notice")).to_contain_text(message)
        chosen.set_input_files(file)
        expect(other.locator(".notice")).to_contain_text("2 conversations imported.")
        other.get_by_role("link", name=TITLES[1]).click()
        expect(other.locator(".answer .markdown")).to_have_text("another answer")
        expect(other.locator(".versions")).to_contain_text("2/2")
        chosen.set_input_files(file)
        expect(other.locator(".notice")).to_contain_text("0 conversations imported; 2 were here already.")
        other.get_by_role("button", name="Delete all conversations").click()
        expect(titles(other)).to_have_count(0)
        other.get_by_role("button", name="Undo").click()
        expect(titles(other)).to_have_count(2)


DEAF = """
    window.missed = [];
    const add = BroadcastChannel.prototype.addEventListener;
    BroadcastChannel.prototype.addEventListener = function (name, run) {
        add.call(this, name, (event) => (window.missed ? missed.push(() => run(event)) : run(event)));
    };
"""


@pytest.mark.nightly
def test_two_tabs_add_to_one_conversation(page: Page) -> None:
    begin(page, "One?", "first")
    other = page.context.new_page()
    other.add_init_script(DEAF)  # so that it asks before it has heard what the other one asks
    other.goto(page.url)
    expect(other.locator(".answer .markdown")).to_have_text("first")
    here, there = Script(page), Script(other)
    page.unroute("**/v1/chat/completions")
    ask(page, "From here?")
    here.say("grows here")
    ask(other, "From there?")
    there.say("grows there")
    other.evaluate("() => { const all = missed; missed = null; all.forEach((run) => run()); }")
    here.end()
    there.end()
    for tab, text in ((page, "grows here"), (other, "grows there")):
        expect(tab.locator(".answer .markdown")).to_have_text(["first", text])
        expect(tab.locator(".of-question .versions")).to_contain_text("/2")
    other.get_by_role("button", name="Former question").click()
    expect(other.locator(".answer .markdown")).to_have_text(["first", "grows here"])
    ask(other, "And on?")
    there.say("a third")
    expect(page.locator(".question", has_text="And on?")).to_be_visible()
    expect(page.locator(".turn").last).to_contain_text("This answer comes in another tab.")
    there.end()
    expect(page.locator(".answer .markdown").last).to_have_text("a third")
    expect(page.locator(".figures")).to_have_count(3)
    other.get_by_role("button", name="Delete One?").click()
    expect(page.locator(".notice")).to_contain_text("deleted in another tab")
    other.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("link", name="One?")).to_be_visible()


@pytest.mark.nightly
def test_an_answer_goes_on_behind_another_conversation(page: Page) -> None:
    script = Script(page)
    ask(page, "A long one")
    script.say("begun")
    expect(page.locator(".answer .markdown")).to_have_text("begun")
    page.get_by_role("button", name="New conversation").click()
    script.say(", and done")
    script.end()
    page.get_by_role("link", name="A long one").click()
    expect(page.locator(".answer .markdown")).to_have_text("begun, and done")


def test_a_growing_answer_is_kept_when_the_page_goes(page: Page) -> None:
    script = Script(page)
    page.get_by_label("Question", exact=True).fill("a draft")
    ask(page, "A long one")
    script.say("begun")
    expect(page.locator(".answer .markdown")).to_have_text("begun")
    page.get_by_label("Question", exact=True).fill("a draft")
    page.reload()
    expect(page.locator(".answer .markdown")).to_have_text("begun")
    expect(page.locator(".figures")).to_contain_text("stopped")
    expect(page.get_by_label("Question", exact=True)).to_have_value("a draft")


@pytest.mark.nightly
def test_a_full_storage_is_told(page: Page) -> None:
    page.evaluate("""() => {
        IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
    }""")
    say(page, "an answer")
    ask(page, "Anything")
    expect(page.locator(".notice")).to_contain_text("The browser's storage is full")
    expect(page.locator(".answer .markdown")).to_have_text("an answer")


@pytest.mark.nightly
def test_without_a_database_the_page_works_for_a_while(browser: Browser, server: Served) -> None:
    with opened(browser) as context:
        context.add_init_script("IDBFactory.prototype.open = () => { throw new Error('forbidden'); }")
        page = context.new_page()
        page.goto(address(server))
        expect(page.locator(".notice")).to_contain_text("This browser keeps no data of this page")
        begin(page, "One?", "first")
        begin(page, "Two?", "second")
        page.get_by_role("link", name="One?").click()
        expect(page.locator(".answer .markdown")).to_have_text("first")
