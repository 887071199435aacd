"""Items of stored responses that the input of /v1/responses refers to."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvern.api.errors import HttpError
from kvern.api.response_items import referred
from kvern.api.response_output import response_of

MOST_RESPONSES = 1000
MOST_BYTES = 16 << 20
"""The limit of all responses that are read for one request."""


async def with_referred_items(value: object, find: Callable[[str], Awaitable[bytes | None]]) -> object:
    """Returns the input with the items that it refers to. `find` returns a response as JSON, or None.

    A reference stays as it is if it is not found, or occurs a second time. Raises HttpError if too much would be read.
    """
    wanted: dict[str, set[str]] = {}
    for item_id in map(referred, value if isinstance(value, list) else ()):
        response_id = None if item_id is None else response_of(item_id)
        if item_id is not None and response_id is not None:
            wanted.setdefault(response_id, set()).add(item_id)
    if not wanted or not isinstance(value, list):
        return value
    if len(wanted) > MOST_RESPONSES:
        message = f"input refers to items of {len(wanted)} responses: at most {MOST_RESPONSES}"
        raise HttpError(400, message, param="input")
    found: dict[str | None, Any] = {}
    left = MOST_BYTES
    for response_id, item_ids in wanted.items():
        response = await find(response_id)
        if response is None:
            continue
        left -= len(response)
        if left < 0:
            message = f"input refers to items of responses of more than {MOST_BYTES} bytes: send the items themselves"
            raise HttpError(413, message, param="input")
        output = msgspec.json.decode(response)["output"]
        found |= {item["id"]: item for item in output if item["id"] in item_ids}
    return [found.pop(referred(item), item) for item in value]
