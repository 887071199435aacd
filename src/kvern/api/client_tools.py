"""Descriptions and schemas, in client_tools.json, of tools that clients run and that requests only name."""

import json
from importlib.resources import files
from typing import Any, Literal


def client_tools(api: Literal["anthropic", "openai"]) -> dict[str, dict[str, Any]]:
    """Returns the tools that an API's requests name by their types: `description` and `parameters` of each."""
    return dict(json.loads(files("kvern.api").joinpath("client_tools.json").read_bytes())[api])
