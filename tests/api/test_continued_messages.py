"""A conversation whose last message goes on is written as transformers writes it."""

from pathlib import Path
from typing import Any

import pytest

from kvern.errors import InvalidRequest
from kvern.structured.grammar import grammars_of
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import Chat, PromptOptions
from tests.support.tiny_tokenizer import byte_level, reference, save

CONTINUED = PromptOptions(add_generation_prompt=False, continue_final_message=True)

WRITTEN = {
    "as it is": "{{ m.content }}<|end|>",
    "trimmed": "{{ m.content | trim }}<|end|>",
    "stripped at the right": "{{ m.content.rstrip() }}\n",
    "stripped of line breaks": "{{ m.content.strip('\n') }}<|end|>",
    "with a blank behind": "{{ m.content | trim }} ",
    "last": "{{ m.content | trim }}",
}
SAID = ["Yes", "Yes ", "Yes, \n\n", " Yes\t", "", "  "]


def chat_of(folder: Path, template: str) -> Chat:
    save(folder, byte_level(), "{% for m in messages %}<|{{ m.role }}|>" + template + "{% endfor %}")
    tokenizer = Tokenizer(folder)
    return Chat(tokenizer, grammars_of(folder, tokenizer.vocab_size), "auto", "auto", 64)


@pytest.mark.parametrize("name", WRITTEN)
def test_continued_messages_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, WRITTEN[name])
    theirs = reference(tmp_path)
    for said in SAID:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hm? "}, {"role": "assistant", "content": said}]
        expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert chat.written(messages, None, CONTINUED) == (expected, said)


def test_messages_in_parts_go_on_too(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, "{% for part in m.content %}{{ part.text | trim }}{% endfor %}<|end|>")
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}, {"type": "image"}]
    assert chat.written([{"role": "assistant", "content": parts}], None, CONTINUED) == ("<|assistant|>ab", "b ")
    with pytest.raises(InvalidRequest, match="no text to go on with"):
        chat.written([{"role": "assistant", "content": [{"type": "image"}]}], None, CONTINUED)
    with pytest.raises(InvalidRequest, match="does not write the last message"):
        chat_of(tmp_path, "-").written([{"role": "assistant", "content": "a"}], None, CONTINUED)
