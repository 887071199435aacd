"""Questions of requests with combined features, and the forms of their answers."""

from typing import Any

QUESTIONS = (
    "Tell me a story about a fox.",
    "What is the weather in Oslo?",
    "Extract the mood and the count as JSON: the sea was calm and we counted 17 gulls.",
)
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["calm", "stormy"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "seen": {"type": "boolean"},
    },
    "required": ["mood", "count", "seen"],
    "additionalProperties": False,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "set_alarm": {
        "type": "object",
        "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
        "required": ["hour"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ARGUMENTS[name]}} for name in ARGUMENTS]
