"""Tools for chat requests in the forms of three APIs, and checks of the calls that come back."""

import json
from typing import Any

import jsonschema

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "City"}},
    "required": ["city"],
}
ALARM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        "days": {"type": "array", "items": {"enum": ["mon", "tue", "sun"]}, "maxItems": 2},
    },
    "required": ["time", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "set_alarm": ALARM}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "set_alarm", "description": "Set an alarm.", "parameters": ALARM}},
]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE: list[Any] = [
    {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]} for tool in FLAT
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


def gathered(stream: Any, choices: int = 1) -> list[dict[str, Any]]:
    """The choices that a stream's chunks add up to; the order of what comes is checked."""
    found: list[dict[str, Any]] = [{"content": "", "reasoning": "", "calls": [], "tokens": 0} for _ in range(choices)]
    for chunk in stream:
        for choice in chunk.choices:
            sum_, delta = found[choice.index], choice.delta
            assert "finish_reason" not in sum_
            sum_["content"] += delta.content or ""
            sum_["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            sum_["tokens"] += len(choice.logprobs.content) if choice.logprobs else 0
            for call in delta.tool_calls or ():
                if call.index == len(sum_["calls"]):
                    assert call.id
                    assert call.type == "function"
                    assert call.function.name
                    sum_["calls"].append([call.function.name, ""])
                else:
                    assert call.id is None
                    assert call.index == len(sum_["calls"]) - 1
                sum_["calls"][call.index][1] += call.function.arguments
            if choice.finish_reason is not None:
                sum_["finish_reason"] = choice.finish_reason
    return found


def check_call(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
