"""The tools of a request and how they may be used; `checks` makes them of what a client sends."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. `parameters` is a JSON schema; `place` is its position in the request."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    place: str


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request. `definitions` are in OpenAI's form, as templates read them.

    `tools` may be called; they are fewer than the definitions if only some are allowed. `choice`: "auto" leaves it to
    the model, "required" enforces a call, `named` one of that tool.
    """

    tools: tuple[Tool, ...] = ()
    definitions: tuple[dict[str, Any], ...] = ()
    choice: Literal["auto", "required", "none"] = "none"
    named: str | None = None
    parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))

    @property
    def constrains_auto(self) -> bool:
        """The model decides whether to call, and how is prescribed."""
        prescribed = not self.parallel or any(tool.strict for tool in self.tools)
        return self.choice == "auto" and (prescribed or len(self.tools) < len(self.definitions))


NO_TOOLS = ToolUse()
