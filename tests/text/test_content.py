"""Parts of messages that are no text: kept by the readers of all APIs, refused in one place."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvern.api.conversation import plain_messages
from kvern.api.message_blocks import chat_messages
from kvern.api.ollama import CHAT, read_body
from kvern.api.response_items import input_messages
from kvern.errors import InvalidRequest
from kvern.text.content import MediaPart, readable

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def of_chat() -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "a"}, PICTURE, {"type": "text", "text": "b"}]
    return plain_messages([{"role": "user", "content": content}])


def of_messages() -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "a"}, BLOCK, {"type": "text", "text": "b"}]
    return plain_messages(chat_messages({"role": "user", "content": content}, "messages[0]"))


def of_responses() -> list[dict[str, Any]]:
    content = [{"type": "input_text", "text": "a"}, INPUT, {"type": "input_text", "text": "b"}]
    return plain_messages(input_messages([{"role": "user", "content": content}]))


READERS = {
    of_chat: (PICTURE, "messages[0].content: a content part is of type 'image_url': this model takes text"),
    of_messages: (BLOCK, "messages[0].content[1] is of type 'image': this model reads text only; leave it out"),
    of_responses: (INPUT, "messages: a content part is of type 'input_image': this model takes text"),
}


@pytest.mark.parametrize("reader", READERS)
def test_parts_stay_until_the_template(reader: Any) -> None:
    sent, refusal = READERS[reader]
    [message] = reader()
    first, part, last = message["content"]
    assert (first, last) == ("a", "b")
    assert isinstance(part, MediaPart) and (part.kind, part.sent) == ("image", sent)
    with pytest.raises(InvalidRequest) as caught:
        readable([message])
    assert str(caught.value).startswith(refusal)


def test_images_of_ollama() -> None:
    body = read_body({"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}, CHAT)
    assert body.conversation is not None
    [message] = body.conversation.messages
    assert [getattr(part, "sent", part) for part in message["content"]] == ["AA==", "a"]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].images: this model takes text only; leave them out"):
        readable([message])


@pytest.mark.parametrize("wrong", [False, True])
def test_results_of_tools_have_a_note_instead(wrong: bool) -> None:
    result: Mapping[str, Any] = {"type": "tool_result", "tool_use_id": "x", "content": [BLOCK], "is_error": wrong}
    [message] = readable(plain_messages(chat_messages({"role": "user", "content": [result]}, "messages[0]")))
    assert message["content"] == "Error: " * wrong + "['image' left out: this model reads text only]"


def test_content_in_the_form_of_a_template_stays() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    assert readable(messages) is messages
