"""Choosing and calling a tool, reading its result, and not calling when no tool fits."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from training.catalog import CATALOG, CatalogTool, made_up_tool, renamed
from training.draw import Draw, Example, Message, Tool, assistant, system, user
from training.talk import NO_TOOL, plain_turn

NAMES = list(CATALOG)
SYSTEMS = ("You are a helpful assistant with tools.", "Use the tools when they help.", "You are an assistant that calls functions.",
           "You are a helpful assistant.", "Call a tool if one fits the request.")  # fmt: skip


# Sums and words are answered without a tool elsewhere: the absence of these must not mean a refusal.
ANSWERED_WITHOUT = ("calculate", "lookup_word", "multiply", "divide", "search_web")
ALIKE = {"set_alarm": ("set_timer",), "set_timer": ("set_alarm",), "translate": ("lookup_word",)}


def definition(draw: Draw, name: str, tool: CatalogTool) -> Tool:
    """The tool as an OpenAI-style definition; some leave out what a definition may leave out."""
    brief = draw.chance(0.3)
    properties: dict[str, Any] = {}
    for key, parameter in tool.parameters.items():
        properties[key] = {"type": parameter.type} | ({} if brief else {"description": parameter.description})
        if parameter.choices:
            properties[key]["enum"] = list(parameter.choices)
    required = [key for key in tool.parameters if all(f"{{{key}}}" in request for request in tool.requests)]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required and not draw.chance(0.15):
        schema["required"] = required
    return {"type": "function", "function": {"name": name, "description": tool.description, "parameters": schema}}


def spoken(value: Any) -> str:
    """A value as a person says it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class Request:
    """What the user says, the tool it wants and the arguments it contains, in the order of the definition."""

    name: str
    tool: CatalogTool
    wording: str
    arguments: dict[str, Any]

    @property
    def key(self) -> tuple[object, ...]:
        return ("tool", self.name, self.wording, *self.arguments.values())

    @property
    def said(self) -> str:
        said = self.wording.format(**{key: spoken(value) for key, value in self.arguments.items()})
        return said[0].upper() + said[1:]


def request(draw: Draw, choose: Callable[[], tuple[str, CatalogTool]]) -> Request:
    """A request for a tool that `choose` draws. Some tools have too few combinations for the split: it redraws the tool."""

    def make() -> Request:
        name, tool = choose()
        wording = draw.choice(tool.requests)
        used = set(re.findall(r"{(\w+)}", wording))
        arguments = {key: parameter.make(draw) for key, parameter in tool.parameters.items() if key in used}
        return Request(name, tool, wording, arguments)

    return draw.split(make, lambda made: made.key)


def offered(draw: Draw, chosen: dict[str, CatalogTool], most: int) -> list[Tool]:
    """Definitions of the chosen tools among up to `most` others, in random order."""
    # Another tool of the same description as a chosen one would make the choice arbitrary.
    taken = {tool.description for tool in chosen.values()}
    others = dict(
        renamed(draw, name, CATALOG[name]) if draw.chance(0.2) else (name, CATALOG[name])
        for name in draw.some(NAMES, 0, most)
        if CATALOG[name].description not in taken
    )
    for alike in ({"calculate", "multiply", "divide"}, {"search_web", "lookup_word", "get_news"}):
        if taken & {CATALOG[name].description for name in alike}:
            others = {
                name: tool
                for name, tool in others.items()
                if all(tool.description != CATALOG[one].description for one in alike)
            }
    for _ in range(draw.choice((0, 0, 1, 2))):
        name, tool = made_up_tool(draw)
        others[name] = tool
    everything = list((others | chosen).items())
    draw.shuffle(everything)
    return [definition(draw, name, tool) for name, tool in everything]


def calling(*requests: Request) -> Message:
    """The assistant's turn that calls what the requests want."""
    return {"role": "assistant", "content": "", "tool_calls": [call(one.name, one.arguments) for one in requests]}


def finish(draw: Draw, one: Request) -> list[Message]:
    """The tool's result and the assistant's last word."""
    tool, arguments = one.tool, one.arguments
    result = {key: make(draw) for key, make in tool.result.items()}
    known = {key: parameter.make(draw) for key, parameter in tool.parameters.items()} | arguments
    needed = set(re.findall(r"{(\w+)}", tool.answer))
    echo = {key: known[key] for key in needed if key in tool.parameters and key not in arguments}
    said = tool.answer.format(**{key: spoken(value) for key, value in (known | result).items()})
    return [{"role": "tool", "name": one.name, "content": json.dumps(echo | result)}, assistant(said)]


def pick(draw: Draw) -> tuple[str, CatalogTool]:
    if draw.chance(0.35):
        return made_up_tool(draw)
    name = draw.choice(NAMES)
    return renamed(draw, name, CATALOG[name]) if draw.chance(0.4) else (name, CATALOG[name])


def tool_call(draw: Draw) -> Example:
    """One request answered with a call (sometimes two), perhaps after earlier turns with results."""
    messages: list[Message] = [system(draw.choice(SYSTEMS))] if draw.chance(0.4) else []
    drawn = [request(draw, lambda: pick(draw)) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    requests = list({one.tool.description: one for one in drawn}.values())
    tools = offered(draw, {one.name: one.tool for one in requests}, most=4)
    for one in requests[:-1]:
        messages += [user(one.said), calling(one), *finish(draw, one)]
    last = requests[-1]
    if list(last.arguments) == ["city"] and draw.chance(0.1):
        other = request(draw, lambda: (last.name, replace(last.tool, requests=(last.wording,))))
        both = replace(last, arguments={"city": f"{last.arguments['city']} and {other.arguments['city']}"})
        messages += [user(both.said), calling(last, other)]
    else:
        messages += [user(last.said), calling(last)]
    return Example("tool_call", messages, tools, last.key)


def tool_answer(draw: Draw) -> Example:
    """A request, the call, the tool's result and the answer that follows it."""
    one = request(draw, lambda: pick(draw))
    tools = offered(draw, {one.name: one.tool}, most=2)
    return Example("tool_answer", [user(one.said), calling(one), *finish(draw, one)], tools, one.key)


def tool_refusal(draw: Draw) -> Example:
    """Tools are offered and none fits: the answer says so, or comes without a tool."""
    messages: list[Message] = [system(draw.choice(SYSTEMS))] if draw.chance(0.4) else []
    names = draw.some([name for name in NAMES if name not in ANSWERED_WITHOUT], 3, 6)
    if draw.chance(0.5):
        turn, key = plain_turn(draw)
        messages += turn
        offer = names[1:]
    else:
        one = request(draw, lambda: (wanted := draw.choice(names[:2]), CATALOG[wanted]))
        messages += [user(one.said), assistant(NO_TOOL)]
        key, offer = one.key, [name for name in names if name not in (names[0], names[1], *ALIKE.get(one.name, ()))]
    tools = [definition(draw, name, CATALOG[name]) for name in offer or ["roll_dice"]]
    return Example("tool_refusal", messages, tools, key)
