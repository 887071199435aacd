"""The OpenAPI description of /v1/responses and /v1/conversations."""

from kvern.server.openapi.bodies import response_fields
from kvern.server.openapi.schemas import (
    EVENT,
    IDENTIFIED,
    LISTING,
    OBJECT,
    ORDERED,
    PAGE,
    SWITCH,
    TEXT,
    Schema,
    get,
    listed,
    optional,
    post,
    record,
    refused,
)

KEPT = (404, 503, 507)
"""Statuses of errors when stored objects are read."""


def response_paths(models: list[str]) -> dict[str, Schema]:
    """Returns the routes of OpenAI's responses."""
    named = ("response_id",)
    create = post(
        "Answer a conversation and store the response.",
        record(response_fields(models), "input"),
        IDENTIFIED,
        streams=True,
    )
    follow = {"stream": SWITCH, "starting_after": {"type": "integer", "minimum": 0, "maximum": 2**31}}
    retrieve = get("A response with its state, or its events.", IDENTIFIED, 400, *KEPT, path=named, query=follow)
    retrieve["responses"]["200"]["content"]["text/event-stream"] = {"schema": EVENT}
    input_items = get("The input of a response.", LISTING, 400, *KEPT, path=named, query={**PAGE, **ORDERED})
    return {
        "/v1/responses": {"post": {**create, "responses": {**create["responses"], "409": refused(409)}}},
        "/v1/responses/{response_id}": {
            "get": retrieve,
            "delete": get("Delete a response.", IDENTIFIED, *KEPT, path=named),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": get("Cancel a background response.", IDENTIFIED, 400, *KEPT, path=named)
        },
        "/v1/responses/{response_id}/input_items": {"get": input_items},
    }


def conversation_paths() -> dict[str, Schema]:
    """Returns the routes of OpenAI's conversations."""
    metadata, items = {"metadata": optional(OBJECT)}, listed(OBJECT, minItems=1)
    one, item = ("conversation_id",), ("conversation_id", "item_id")
    begun = record({**metadata, "items": optional(listed(OBJECT))})
    return {
        "/v1/conversations": {"post": post("Create a conversation.", begun, IDENTIFIED)},
        "/v1/conversations/{conversation_id}": {
            "get": get("A conversation.", IDENTIFIED, *KEPT, path=one),
            "post": post("Change the metadata of a conversation.", record(metadata), IDENTIFIED, path=one),
            "delete": get("Delete a conversation.", IDENTIFIED, *KEPT, path=one),
        },
        "/v1/conversations/{conversation_id}/items": {
            "get": get("The items of a conversation.", LISTING, 400, *KEPT, path=one, query={**PAGE, **ORDERED}),
            "post": post("Add items.", record({"items": items}, "items"), LISTING, path=one),
        },
        "/v1/conversations/{conversation_id}/items/{item_id}": {
            "get": get(
                "An item of a conversation.", record({"id": TEXT, "type": TEXT}, "id", "type"), *KEPT, path=item
            ),
            "delete": get("Delete an item.", IDENTIFIED, *KEPT, path=item),
        },
    }
