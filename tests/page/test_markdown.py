"""What the chat page makes of a model's Markdown, which nobody has checked."""

from playwright.sync_api import Locator, Page, expect

from tests.support.chat_page import Script, ask, say


def shown(page: Page, text: str) -> Locator:
    say(page, text)
    ask(page, "Anything")
    expect(page.locator(".figures")).to_have_count(1)
    return page.locator(".answer .markdown")


def test_scripts_images_and_addresses_do_nothing(page: Page) -> None:
    hostile = (
        '<img src=x onerror="document.title=1"><script>document.title=2</script> [link](javascript:alert(1)) '
        "![picture](https://outside.example/x.png) [https://kvern.example](https://outside.example/y) "
        r"<style>body{display:none}</style> $\href{javascript:alert(1)}{x}$ $\includegraphics{https://outside.example/z}$"
    )
    answer = shown(page, f"**bold** and\n\n{hostile}\n\n<iframe src='https://outside.example'></iframe>")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator(".host")).to_have_text(["outside.example", "outside.example"])
    assert answer.locator("img, script, style, iframe, [onerror], [href^=javascript]").count() == 0
    link = answer.get_by_role("link", name="https://kvern.example")
    expect(link).to_have_attribute("title", "https://outside.example/y")
    expect(link).to_have_attribute("rel", "noopener noreferrer")


def test_code_is_coloured_and_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = shown(page, "```python\nprint(1 < 2)  # less\n```\n\n```strange\n<b>\n```")
    expect(answer.locator("pre code").first).to_have_text("print(1 < 2)  # less\n")
    expect(answer.locator(".hljs-comment")).to_have_text("# less")
    expect(answer.locator("pre code").last).to_have_text("<b>\n")
    answer.get_by_role("button", name="Copy").first.click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1 < 2)  # less\n"


def test_formulas_are_set_and_prices_are_not(page: Page) -> None:
    text = (
        r"It is $\frac{a}{b}$ or \(x^2\), for $5 and $10." + "\n\n$$\n\\int_0^1 x\\,dx\n$$\n\n" + r"\[y = \badmacro{\]"
    )
    answer = shown(page, text)
    expect(answer.locator("math")).to_have_count(3)
    expect(answer.locator("mfrac")).to_have_count(1)
    expect(answer).to_contain_text("for $5 and $10.")
    expect(answer.locator(".math.source")).to_have_text(r"y = \badmacro{")


def test_tables_are_aligned_and_names_of_links_are_found(page: Page) -> None:
    answer = shown(page, "| a | b |\n|:-:|--:|\n| 1 | 2 |\n\nSee [it][1].\n\n[1]: https://outside.example/1")
    alignment = "cells => cells.map(cell => getComputedStyle(cell).textAlign.replace('-webkit-', ''))"
    expect(answer.locator("td")).to_have_count(2)
    assert answer.locator("td").evaluate_all(alignment) == ["center", "right"]
    expect(answer.get_by_role("link", name="it")).to_have_attribute("href", "https://outside.example/1")


def test_only_the_end_of_a_growing_answer_is_drawn_again(page: Page) -> None:
    script = Script(page)
    ask(page, "Anything")
    paragraphs = [f"Paragraph {number}.\n\n" for number in range(6)]
    for text in paragraphs:
        script.say(text)
    answer = page.locator(".answer .markdown")
    expect(answer.locator("p")).to_have_count(6)
    watch = """answer => {
        window.changed = new Set();
        new MutationObserver(all => all.forEach(({ target }) => {
            const block = [...answer.children].find(child => child.contains(target));
            if (block) changed.add([...answer.children].indexOf(block));
        })).observe(answer, { childList: true, subtree: true, characterData: true });
    }"""
    answer.evaluate(watch)
    script.say("The end grows")
    script.say(" and grows.\n\n- a list\n")
    expect(answer.locator("li")).to_have_count(1)
    assert min(page.evaluate("[...changed]"), default=6) >= 4
    script.end()
    expect(page.locator(".figures")).to_have_count(1)
    expect(answer.locator("p")).to_have_text([text.strip() for text in paragraphs] + ["The end grows and grows."])
