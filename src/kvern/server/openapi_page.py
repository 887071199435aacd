"""The OpenAPI document as a page, at /docs."""

import html

from kvern.server.openapi import Schema


def page(described: Schema) -> str:
    """Returns the document as one HTML page without scripts."""
    parts = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {})
            forms = [content["schema"] for content in body.values()]
            fields = "".join(_fields(choice) for form in forms for choice in form.get("anyOf", [form]))
            codes = ", ".join(operation["responses"])
            parts.append(
                f"<details><summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> "
                f"{html.escape(operation['summary'])}</summary>{fields}<p>Answers: {codes}</p></details>"
            )
    about = html.escape(described["info"]["description"])
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>kvern: API</title><style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60rem;"
        "margin:2rem auto;padding:0 1rem}td,th{text-align:left;vertical-align:top;padding:.2rem 1rem .2rem 0}"
        "summary{cursor:pointer;padding:.3rem 0}</style>"
        f"<h1>kvern {html.escape(described['info']['version'])}</h1><p>{about}</p>"
        f'<p>As a document: <a href="openapi.json">openapi.json</a></p>{"".join(parts)}</html>'
    )


def _fields(schema: Schema) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        need = "required" if name in schema.get("required", ()) else ""
        text = html.escape(field.get("description", ""))
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(kind_of(field))}<td>{need}<td>{text}")
    return f"<table><tr><th>field<th>type<th><th>{''.join(rows)}</table>" if rows else ""


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
