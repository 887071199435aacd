"""Fields of a body that belong to conversations only, and those about thinking, under all names that clients use.

budget     thinking_budget, thinking_token_budget, reasoning.max_tokens, thinking.budget_tokens
on or off  enable_thinking, thinking.type, reasoning.enabled, reasoning_effort, reasoning.effort
shown      include_reasoning, reasoning.exclude
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import InvalidRequest, shown

THINKING_FIELDS = frozenset(
    {
        "thinking_budget",
        "thinking_token_budget",
        "include_reasoning",
        "reasoning_effort",
        "reasoning",
        "enable_thinking",
        "thinking",
    }
)
CHAT_FIELDS = THINKING_FIELDS | frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "prediction",
    }
)


UNLIMITED = -1
"""The budget without a limit."""
SWITCHES = ("enable_thinking", "thinking")
"""Names of the template variable that turns thinking on and off."""


@dataclass(frozen=True)
class ThinkingFields:
    """The fields of a body. `budget` is in tokens, None for no limit; `variables` are for the chat template."""

    budget: int | None
    include: bool
    variables: dict[str, Any]


def read_thinking(body: Mapping[str, Any]) -> ThinkingFields:
    """Checks the fields. Raises InvalidRequest where two names disagree."""
    reasoning, thinking = _object(body, "reasoning"), _thinking(body)
    excluded = _switch("reasoning.exclude", reasoning.get("exclude"))
    included = _switch("include_reasoning", body.get("include_reasoning"))
    effort = _agreed({"reasoning_effort": body.get("reasoning_effort"), "reasoning.effort": reasoning.get("effort")})
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest(f"reasoning_effort is {shown(effort)}: it must be a text")
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    enabled = _enabled(body, reasoning, thinking, effort)
    if enabled is not None:
        variables |= dict.fromkeys(SWITCHES, enabled)
    if enabled and thinking.get("type") in ("adaptive", "auto"):
        variables["thinking_type"] = "adaptive"
    cleared = _switch("thinking.clear_thinking", thinking.get("clear_thinking"))
    if cleared is not None:
        variables["clear_thinking"] = cleared
    return ThinkingFields(_budget(body, reasoning, thinking), not excluded and included is not False, variables)


def _enabled(
    body: Mapping[str, Any], reasoning: Mapping[str, Any], thinking: Mapping[str, Any], effort: str | None
) -> bool | None:
    """Returns whether the model should think, by the most explicit field; None leaves it to the template."""
    said = (
        _switch("enable_thinking", body.get("enable_thinking")),
        None if "type" not in thinking else thinking["type"] != "disabled",
        _switch("reasoning.enabled", reasoning.get("enabled")),
        None if effort is None else effort != "none",
    )
    return next((value for value in said if value is not None), None)


def _budget(body: Mapping[str, Any], reasoning: Mapping[str, Any], thinking: Mapping[str, Any]) -> int | None:
    budget = _agreed(
        {
            "thinking_budget": body.get("thinking_budget"),
            "thinking_token_budget": body.get("thinking_token_budget"),
            "reasoning.max_tokens": reasoning.get("max_tokens"),
            "thinking.budget_tokens": thinking.get("budget_tokens"),
        }
    )
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < UNLIMITED):
        raise InvalidRequest(
            f"thinking_budget is {shown(budget)}: it must be a number of tokens, 0 or more, or -1 for no limit"
        )
    return None if budget == UNLIMITED else budget


def _thinking(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `thinking`, an object with a type; some clients send true or false."""
    value = body.get("thinking")
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    thinking = _object(body, "thinking")
    if thinking.get("type", "enabled") not in ("enabled", "disabled", "adaptive", "auto"):
        raise InvalidRequest(f"thinking.type is {shown(thinking['type'])}: it must be enabled, disabled or adaptive")
    return thinking


def _agreed(named: Mapping[str, Any]) -> Any:
    """Returns the value that all given names agree on. Raises InvalidRequest if they differ."""
    given = {name: value for name, value in named.items() if value is not None}
    first = next(iter(given.items()), (None, None))
    for name, value in given.items():
        if value != first[1]:
            raise InvalidRequest(
                f"{first[0]} is {shown(first[1])} and {name} is {shown(value)}: they mean the same, so give one of them"
            )
    return first[1]


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {shown(value)}: it must be an object")
    return {key: inner for key, inner in (value or {}).items() if inner is not None}


def _switch(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}: it must be true or false")
    return value
