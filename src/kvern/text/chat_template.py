"""Chat templates: Jinja programs in checkpoints that turn messages into a prompt.

The environment is that of Hugging Face transformers, for which templates are written: an immutable sandbox with
``trim_blocks`` and ``lstrip_blocks``, ``break``/``continue``, ``tojson`` without HTML escapes, ``raise_exception``,
``strftime_now`` and ``{% generation %}`` blocks (rendered as if the tags were not there).
"""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime

from kvern.errors import CorruptCheckpoint, InvalidRequest, shown
from kvern.io.files import read_object, read_whole, reason
from kvern.text.message_forms import PROBED_TOOL, MessageForms
from kvern.text.template_sandbox import BoundedEnvironment, TooSlow

Definition = Mapping[str, Any]


def forms_of(tools: Sequence[Definition] | None) -> list[Sequence[Definition] | None]:
    """Returns the tools as they are, and fuller forms to try in turn if a template refuses them.

    Without tools these are None and an empty list: some templates need its length.
    """
    if tools is None:
        return [None, []]
    return [tools, [_filled(tool, False) for tool in tools], [_filled(tool, True) for tool in tools]]


def _filled(tool: Definition, plain: bool) -> Definition:
    """Returns a definition with a description and parameters; `plain` gives each parameter a description and one
    type."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    parameters = {"type": "object", "properties": {}, "required": [], **_said(function.get("parameters"))}
    if plain:
        parameters = _plain(parameters)
    return {**tool, "function": {"description": "", **_said(function), "parameters": parameters}}


def _plain(schema: object) -> dict[str, Any]:
    plain = {"description": "", **_said(schema)}
    plain["type"] = _type(plain)
    if isinstance(plain.get("properties"), Mapping):
        plain["properties"] = {name: _plain(inner) for name, inner in plain["properties"].items()}
    elif plain["type"] == "object":
        plain = {"properties": {}, "required": [], "additionalProperties": False, **plain}
    if isinstance(plain.get("items"), Mapping):
        plain["items"] = _plain(plain["items"])
    return plain


def _type(schema: Mapping[str, Any]) -> str:
    """Returns one type; of several, the first that is not null."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds
    choices = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) else []
    for name in ("anyOf", "oneOf"):
        inner = schema.get(name)
        choices += [each["type"] for each in inner if isinstance(each, Mapping) and "type" in each] if inner else []
    known = [kind for kind in choices if isinstance(kind, str) and kind != "null"]
    return known[0] if known else "object" if "properties" in schema else "string"


def _said(schema: object) -> dict[str, Any]:
    """Returns a schema without null values."""
    return {name: value for name, value in schema.items() if value is not None} if isinstance(schema, Mapping) else {}


TOOLS = ("tools", "xml_tools", "json_tools", "functions", "available_tools", "tool_definitions", "python_tools")
"""Names of the variable with the definitions of tools; the first that a template reads gets them."""
LACKING = (jinja2.UndefinedError, TypeError, RecursionError)
"""Errors that templates raise if a definition of a tool lacks something."""
MOST_SLOW = 2
"""The number of renderings that take too long after which a template is given up, if none has succeeded."""


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it on the instance)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without the HTML escapes of Jinja's own ``tojson``, which would put ``\\u003c`` into prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def environment() -> BoundedEnvironment:
    result = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    result.set_filter("tojson", to_json)
    result.globals["raise_exception"] = raise_exception
    result.globals["strftime_now"] = strftime_now
    return result


class ChatTemplate:
    """The templates of one model by name: usually only ``default``, sometimes also ``tool_use``."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._compiled: dict[str, jinja2.Template] = {}
        self._forms: dict[bool, MessageForms] = {}
        self._tools: dict[str, str] = {}
        self._slow: Counter[str] = Counter()  # renderings that took too long
        self._rendered: set[str] = set()

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
        """Reads ``chat_template.jinja``, ``additional_chat_templates/`` and ``tokenizer_config.json``."""
        sources: dict[str, Any] = {}
        inline = tokenizer_config.get("chat_template")
        try:
            if isinstance(inline, str):
                sources["default"] = inline
            elif isinstance(inline, list):
                sources.update({entry["name"]: entry["template"] for entry in inline})
            for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                sources[path.stem] = read_whole(path).decode()
            if os.path.lexists(folder / "chat_template.jinja"):
                sources["default"] = read_whole(folder / "chat_template.jinja").decode()
            elif "default" not in sources and os.path.lexists(folder / "chat_template.json"):
                sources["default"] = read_object(folder / "chat_template.json")["chat_template"]
        except (LookupError, TypeError, ValueError, FileNotFoundError) as error:
            raise CorruptCheckpoint(f"a chat template of {folder} cannot be read: {reason(error)}") from None
        if not all(isinstance(source, str) for source in sources.values()):
            raise CorruptCheckpoint(f"a chat template of {folder} is not text")
        return cls(sources)

    def __bool__(self) -> bool:
        return bool(self._sources)

    def source(self, tools: bool) -> str:
        """Returns the source of the template that is used with or without tools; empty if there is none."""
        return self._sources.get("tool_use" if tools and "tool_use" in self._sources else "default", "")

    def fit_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: bool, special_tokens: Mapping[str, str]
    ) -> Sequence[Mapping[str, Any]]:
        """Returns the messages in the template's form. Raises InvalidRequest."""
        check_messages(messages)
        return self.forms(tools, special_tokens).fit(messages, tools)

    def forms(self, tools: bool, special_tokens: Mapping[str, str]) -> MessageForms:
        """Returns the message forms of the template that is used with or without tools."""

        def render(probes: Sequence[Mapping[str, Any]]) -> str:
            return self.render(probes, [PROBED_TOOL] if tools else None, True, special_tokens)

        if tools not in self._forms:
            self._forms[tools] = MessageForms(render)
        return self._forms[tools]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Returns the prompt as text. Missing parts of tool definitions are filled in if the template refuses them.

        ``variables`` are further names for the template (special tokens, switches like ``enable_thinking``).

        Raises:
            InvalidRequest: the model has no template, the messages are malformed, or the template refuses them.
        """
        check_messages(messages)
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        template = self._template(name)
        names = {
            "documents": None,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        if self._slow[name] >= MOST_SLOW and name not in self._rendered:
            raise InvalidRequest(f"the model's chat template is not tried again: {MOST_SLOW} renderings took too long")
        refusal = ""
        for form in forms_of(tools):
            try:
                template.environment.begin()  # type: ignore[attr-defined]
                called = {self._tools[name]: form} if form else {}
                text = template.render({**called, **names}, tools=form)
                self._rendered.add(name)
                return text
            except Exception as error:  # a template is a program from outside: any error of it is a bad request
                self._slow[name] += isinstance(error, TooSlow)
                refusal = refusal or one_line(error)
                if not isinstance(error, LACKING):
                    break
        raise InvalidRequest(f"the model's chat template refused the messages: {refusal}")

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if name not in self._sources:
                raise InvalidRequest(
                    "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                    "send a prompt instead of messages"
                )
            try:
                self._compiled[name] = environment().from_string(self._sources[name])
                self._tools[name] = _name_of_tools(self._sources[name])
            except jinja2.TemplateError as error:
                raise InvalidRequest(f"the model's chat template cannot be compiled: {one_line(error)}") from error
        return self._compiled[name]


def _name_of_tools(source: str) -> str:
    """Returns the name of the tool definitions in a template that can be compiled."""
    if not any(name in source for name in TOOLS[1:]):
        return TOOLS[0]
    read = jinja2.meta.find_undeclared_variables(environment().parse(source))
    return next((name for name in TOOLS if name in read), TOOLS[0])


def check_messages(messages: object) -> None:
    """Refuses messages that no template can render, with the number of the wrong one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest(f"messages must be a list with at least one message, got {shown(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"message {index} must be an object with a role, got {shown(message)}")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"message {index} has no role (system, user, assistant or tool): {shown(message)}")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise InvalidRequest(f"message {index} has content of type {type(content).__name__}: it must be text")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
