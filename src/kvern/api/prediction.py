"""OpenAI's predicted outputs: the field `prediction`."""

from collections.abc import Mapping
from typing import Any

from kvern.api.errors import HttpError
from kvern.api.fields import typed
from kvern.errors import shown


def read_prediction(body: Mapping[str, Any]) -> str:
    """Returns the text of `prediction`, empty if there is none. Raises HttpError."""
    prediction = typed(body, "prediction", dict, None)
    if prediction is None:
        return ""
    if prediction.get("type") != "content":
        message = f"prediction.type is {shown(prediction.get('type'))}: it must be content"
        raise HttpError(400, message, param="prediction")
    content = prediction.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(_is_text(part) for part in parts):
        message = f"prediction.content is {shown(content)}: it must be a text, or a list of parts of type text"
        raise HttpError(400, message, param="prediction")
    return "".join(part["text"] for part in parts)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
