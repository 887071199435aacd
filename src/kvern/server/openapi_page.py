"""The OpenAPI document as a page, at /docs; `openapi_page.html` is its template."""

from kvern.io.pages import render
from kvern.server.openapi import Schema


def page(described: Schema) -> str:
    """Returns the document as one HTML page without scripts."""
    return render("kvern.server", "openapi_page.html", described=described, kind_of=kind_of)


def kind_of(schema: Schema) -> str:
    """Returns a type in words."""
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        kinds = [kind_of(option) for option in schema["anyOf"] if option != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"list of {kind_of(schema['items'])}"
    return str(schema.get("type", "anything"))
