"""The sandbox of chat templates: nothing can be changed, and time and memory are limited.

No operation of a template makes a large value out of small ones in one step: if a result can be longer than its inputs,
its length is computed first. All values of one rendering together are limited as well. An operation that takes more
than it makes (such as a search in a list) takes milliseconds at most, and the time of a rendering is checked around
each.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_ROUNDS = 1_000_000
"""The limit of iterations of all loops and macros in one rendering."""
MOST_CHARACTERS = 1 << 24
"""The limit of one value."""
MOST_MADE = 1 << 27
"""The limit of all values in one rendering, in characters."""
MOST_SECONDS = 2.0
"""The limit of computing time of one rendering. The longest conversations in a request take a tenth of that."""
LOOK_SECONDS = 0.05
"""The interval of checks of the computing time, which cost more than reading the clock."""
LONGEST_NUMBER = 1000
"""The limit of digits when rounding a number."""
MISSING = ("batch", "slice", "wordwrap")
"""Filters of Jinja that no template needs, and that make large values out of small ones."""

QUICK_TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean"}
"""Tests that take no time for any value."""


class TooSlow(jinja2.TemplateError):
    """A rendering took too much time."""


class Rendering(threading.local):
    """The resources that the current rendering of this thread has used."""

    rounds = 0
    made = 0
    begun = 0.0
    """The thread's computing time at the start, in seconds."""
    look = 0.0
    """The time of the next check, by the clock."""


class InsertedChecks(jinja2.visitor.NodeTransformer):
    """Inserts calls of the environment where Jinja compiles operations that cannot be limited otherwise."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 (Jinja names it)
        """Limits `a ~ b`."""
        self.generic_visit(node)
        return _call("joined", node.nodes).set_lineno(node.lineno)

    def visit_For(self, node: jinja2.nodes.For | jinja2.nodes.Macro) -> jinja2.nodes.Node:  # noqa: N802
        """Counts each iteration of a loop, and each macro."""
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call("count_round", [])).set_lineno(node.lineno))
        return node

    visit_Macro = visit_For  # noqa: N815

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:  # noqa: N802
        """Times `a in b` and other comparisons of whole lists; a comparison with a constant is not timed."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        is_quick = len(sides) == 2 and node.ops[0].op in ("eq", "ne")
        if is_quick and any(isinstance(side, jinja2.nodes.Const) for side in sides):
            return node
        return _call("timed", [node]).set_lineno(node.lineno)

    def visit_Test(self, node: jinja2.nodes.Test) -> jinja2.nodes.Node:  # noqa: N802
        """Times `a is in b` and other tests of whole lists or texts."""
        self.generic_visit(node)
        return node if node.name in QUICK_TESTS else _call("timed", [node]).set_lineno(node.lineno)


def _call(name: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), arguments, [], None, None)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment with limits. Call `begin` before each rendering."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        self._rendering = Rendering()
        super().__init__(finalize=self.checked, **options)
        for name, work in list(self.filters.items()):
            self.set_filter(name, work)
        for name in MISSING:
            del self.filters[name]
        del self.globals["lipsum"]

    def set_filter(self, name: str, work: Callable[..., Any]) -> None:
        """Sets a filter of kvern's own."""
        self.filters[name] = self._bounded(name, work)

    def begin(self) -> None:
        """Resets the used resources."""
        rendering = self._rendering
        rendering.rounds = rendering.made = 0
        rendering.begun, rendering.look = time.thread_time(), time.monotonic() + LOOK_SECONDS

    def check_time(self) -> None:
        """Raises TooSlow if the rendering has computed for too long."""
        if (now := time.monotonic()) < self._rendering.look:
            return
        self._rendering.look = now + LOOK_SECONDS
        if time.thread_time() - self._rendering.begun > MOST_SECONDS:
            raise TooSlow(f"it computes for more than {MOST_SECONDS:g} s")

    def timed(self, value: Any) -> Any:
        """Returns a value that was just computed, after a check of the time."""
        self.check_time()
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = InsertedChecks().visit(super()._parse(source, name, filename))
        return template

    def count_round(self) -> None:
        """Counts an iteration of a loop, or a macro."""
        self.check_time()
        self._rendering.rounds += 1
        if self._rendering.rounds > MOST_ROUNDS:
            raise jinja2.TemplateError(f"its loops and macros run more than {MOST_ROUNDS} times")

    def make(self, size: int) -> None:
        """Counts a value of so many characters. Raises TemplateError if that is too much."""
        self.check_time()
        self._rendering.made += size
        if size > MOST_CHARACTERS or self._rendering.made > MOST_MADE:
            raise jinja2.TemplateError(
                f"it makes a value of {size} characters and {self._rendering.made} in all: at most {MOST_CHARACTERS} "
                f"and {MOST_MADE}"
            )

    def checked(self, value: Any) -> Any:
        """Returns a value that will be written as text, counted."""
        if not isinstance(value, str):
            self.make(extent(value))
        return value

    def joined(self, *values: Any) -> str:
        """Returns `a ~ b`, counted."""
        self.make(sum(map(extent, values)))
        return "".join(map(str, values))

    def concat(self, pieces: Iterable[str]) -> str:
        """Returns the output of a template, macro or block, counted."""
        found, size = [], 0
        for piece in pieces:
            found.append(piece)
            size += len(piece)
            if size > MOST_CHARACTERS:
                break
        self.make(size)
        return "".join(found)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a binary operation after its size is checked."""
        are_sequences = [isinstance(side, str | bytes | list | tuple) for side in (left, right)]
        if operator == "+" and all(are_sequences):
            self.make(len(left) + len(right))
        elif operator == "%" and are_sequences[0]:
            self.make(_formatted(left, "%", right if isinstance(right, tuple) else (right,)))
        elif operator in ("*", "**"):
            sizes = [len(side) if isinstance(side, str | bytes | list | tuple) else side for side in (left, right)]
            if all(isinstance(size, int) for size in sizes):
                size = abs(sizes[0] * sizes[1] if operator == "*" else sizes[1] * int(sizes[0]).bit_length())
                if size > MOST_ROUNDS:
                    raise jinja2.TemplateError(f"{operator} would make a value of size {size}: at most {MOST_ROUNDS}")
                self.make(size if any(are_sequences) else 0)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Limits methods of texts and numbers like filters."""
        value = getattr(__obj, "__self__", None)
        if isinstance(value, str | bytes | int):
            args, kwargs = __self._prepared(__obj.__name__, value, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Limits `format` of a text."""
        work = super().wrap_str_format(value)
        if work is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self.make(_formatted(value.__self__, "{", (*args, *kwargs.values())))
            return work(*args, **kwargs)

        return bounded

    def _bounded(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        takes_first = hasattr(work, "jinja_pass_arg")

        @functools.wraps(work)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            first = args[:takes_first]
            value = args[takes_first]
            others = args[takes_first + 1 :]
            if name == "join" and not isinstance(value, str):
                value = list(value)
            others, kwargs = self._prepared(name, value, others, kwargs)
            return work(*first, value, *others, **kwargs)

        return bounded

    def _prepared(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Refuses a filter or method that would make a too large value. Iterators among the arguments become lists."""
        args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        given = (*args, *kwargs.values())
        numbers = [abs(each) for each in given if isinstance(each, int)]
        longest = max(numbers, default=0)
        if name == "translate" or (name in ("round", "to_bytes") and longest > LONGEST_NUMBER):
            raise jinja2.TemplateError(f"{name} is not for templates, or not with {longest}")
        size = extent(value) + sum(map(extent, given))
        if name == "replace" and len(given) > 1:
            size += str(value).count(str(given[0])) * extent(given[1])
        elif name == "join":
            size += sum(len(each) * extent(value) for each in given if isinstance(each, list | tuple | dict))
            size += len(value) * extent(given[0]) if isinstance(value, list) and given else 0
        elif name in ("indent", "expandtabs", "tojson"):
            steps = size if name == "tojson" else len(re.findall("[\n\t]", str(value))) + 1
            size += steps * max(numbers + [extent(each) for each in given if isinstance(each, str)], default=8)
        elif name == "format":
            size += _formatted(str(value), "%", given)
        self.make(size + longest)
        return args, kwargs


def extent(value: Any) -> int:
    """Returns the approximate number of characters of a value as text; counting ends above the limit."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    size, left = 0, [value]
    while left and size <= MOST_CHARACTERS:
        item = left.pop()
        if isinstance(item, dict):
            size += 2
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            size += 2
            left += item
        else:
            size += 4 + (len(item) if isinstance(item, str | bytes) else 16)
    return size


def _formatted(text: str | bytes, mark: str, values: tuple[Any, ...]) -> int:
    """Returns the most characters of a formatted text, by its numbers and its longest value."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    widths = [int(digits[:9]) for digits in re.findall("[0-9]+", text)]
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{", text):  # the width is one of the values
        widths += [abs(value) for value in values if isinstance(value, int)]
    return len(text) + sum(widths) + text.count(mark) * max((*map(extent, values), *widths), default=0)
