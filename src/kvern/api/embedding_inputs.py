"""The inputs in a body of /v1/embeddings: OpenAI's texts and token ids, Jina's objects, vLLM's messages.

{"input": ["a cat", {"text": "a dog"}, {"image": "data:image/png;base64,..."}]}
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}]}
"""

from collections.abc import Mapping
from typing import Any

from kvern.api.completions import read_prompts
from kvern.api.errors import HttpError, wrong_value
from kvern.engine.inputs import ONE_INPUT, Prompt
from kvern.errors import shown
from kvern.images.parts import file_id_of, held_by
from kvern.text.content import MediaPart, kind_of

MOST_TEXTS = 2048
"""OpenAI's limit: some clients send a thousand texts at once."""
Input = Prompt | MediaPart
"""A text, token ids, or an image as it was sent."""


def read_inputs(body: Mapping[str, Any]) -> list[Input]:
    """Returns the inputs of a body. Raises HttpError."""
    if body.get("messages"):
        return [_of_messages(body)]
    if "input" not in body:
        raise HttpError(400, "input is missing: a text, a list of token ids, or a list of these", param="input")
    given = body["input"]
    items = given if isinstance(given, list) else [given]
    if not any(isinstance(item, Mapping) for item in items):
        return list(read_prompts(body, "input", MOST_TEXTS))
    if len(items) > MOST_TEXTS:
        raise HttpError(400, f"input holds {len(items)} prompts: at most {MOST_TEXTS}", param="input")
    return [_read(item, f"input[{number}]", "input") for number, item in enumerate(items)]


def _of_messages(body: Mapping[str, Any]) -> Input:
    messages = body["messages"]
    if body.get("input") is not None:
        raise HttpError(400, "input and messages are both given: send one of them", param="messages")
    first = messages[0] if isinstance(messages, list) and len(messages) == 1 else None
    if not isinstance(first, Mapping) or first.get("role") != "user":
        raise wrong_value("messages", messages, "one message of the role user, with a text or an image")
    content = first.get("content")
    parts = content if isinstance(content, list) else [content]
    if len(parts) != 1:
        raise HttpError(400, f"messages[0].content has {len(parts)} parts: {ONE_INPUT}", param="messages")
    return _read(parts[0], "messages[0].content[0]", "messages")


def _read(item: object, place: str, name: str) -> Input:
    """Returns one input, which may be an object. Raises HttpError."""
    if isinstance(item, str | list):
        return item
    if isinstance(item, Mapping):
        kind, text = kind_of(item), item.get("text")
        has_image = kind == "image" or held_by(item) is not None or file_id_of(item) is not None
        if has_image and text is not None:
            raise HttpError(400, f"{place} has a text and an image: {ONE_INPUT}", param=name)
        if has_image:
            return MediaPart("image", item, "")
        if isinstance(text, str):
            return text
        if kind is not None:
            raise HttpError(400, f"{place} is of kind {kind}: texts and images are embedded; leave it out", param=name)
    raise HttpError(
        400,
        f'{place} is {shown(item)}: it must be a text, token ids, {{"text": ...}} or {{"image": "data:..."}}',
        param=name,
    )
