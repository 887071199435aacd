"""Regular expressions in the subset that xgrammar enforces.

xgrammar ignores lookaheads and anchors with a warning at most, lets `.` match a newline, and inside JSON allows raw
quotes and control characters, or fails at repeated groups and alternatives. So an expression is parsed here and written
with classes of plain characters; unknown syntax is refused.
"""

import re
from collections.abc import Iterable

from kvern.errors import InvalidParameter

Ranges = list[tuple[int, int]]
"""Code points, first and last, ascending and apart."""

TOKENS = re.compile(
    r"\\(?P<escape>.)|\[(?P<negated>\^?)(?P<members>(?:[^\\\[\]]|\\.)+)\]|(?P<open>\((?:\?s?:)?)|(?P<close>\))"
    r"|(?P<bar>\|)|(?P<repeat>(?:[*+?]|\{\d{1,4}(?:,\d{0,4})?\})\??)|(?P<any>\.)|(?P<plain>[^\\\[\](){}*+?.^$|])",
    re.DOTALL,
)
MEMBERS = re.compile(r"\\(?P<escape>.)|(?P<first>[^\\])(?:-(?P<last>[^\\]))?", re.DOTALL)
AMBIGUOUS = re.compile(r"\\.-.|[^\\]-\\.|&&|--|~~", re.DOTALL)
"""Ranges from or to an escape, and syntax that some dialects read as set operations."""
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""No text has them, though bytes that are not UTF-8 can look like them."""
NOT_IN_JSON = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
"""Characters that need an escape in a JSON text."""
ESCAPES: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
    "t": [(0x09, 0x09)],
    "n": [(0x0A, 0x0A)],
    "r": [(0x0D, 0x0D)],
}
"""Character sets in ASCII: subsets of the usual meaning."""


def plain_text(least: int, most: int | None) -> str:
    """A pattern for `least` to `most` characters that need no escape in JSON."""
    return f"{_class([(0, LAST)], True)}{{{least},{'' if most is None else most}}}"


def plain_pattern(pattern: str, in_json: bool) -> str:
    """A pattern for full matches of `pattern`. Raises InvalidParameter for syntax that xgrammar ignores."""
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", inner):
        inner = inner[:-1]
    written = []
    place = 0
    repeatable = False
    while place < len(inner):
        found = TOKENS.match(inner, place)
        in_group = found is not None and (found["open"] or found["close"] or found["bar"])
        if found is None or (found["repeat"] and not repeatable) or (in_json and in_group):
            raise _refusal(pattern, inner[place : place + 10])
        place, repeatable = found.end(), not (found["open"] or found["bar"] or found["repeat"])
        if found["open"]:
            written.append("(?:")
        elif found["repeat"]:
            written.append(found["repeat"] if len(found["repeat"]) == 1 else found["repeat"].removesuffix("?"))
        elif found["close"] or found["bar"]:
            written.append(found[0])
        elif found["members"]:
            ranges = _members(found["members"], bool(found["negated"]), pattern)
            written.append(_class(_without([(0, LAST)], ranges) if found["negated"] else ranges, in_json, pattern))
        elif found["any"]:
            written.append(_class(_without([(0, LAST)], [(0x0A, 0x0A), (0x0D, 0x0D)]), in_json))
        else:
            ranges = _escaped(found["escape"], pattern) if found["escape"] else _characters(found["plain"])
            written.append(_class(ranges, in_json, pattern))
    return "".join(written)


def _members(members: str, negated: bool, pattern: str) -> Ranges:
    if found := AMBIGUOUS.search(members):
        raise _refusal(pattern, found[0])
    ranges: Ranges = []
    for found in MEMBERS.finditer(members):
        if found["escape"]:
            if negated and found["escape"] in "dws":  # there is more in Unicode that must not be let in
                raise _refusal(pattern, f"[^{members}]")
            ranges += _escaped(found["escape"], pattern)
        else:
            first, last = ord(found["first"]), ord(found["last"] or found["first"])
            if last < first:
                raise _refusal(pattern, found[0])
            ranges.append((first, last))
    return ranges


def _escaped(character: str, pattern: str) -> Ranges:
    if character in ESCAPES:
        return ESCAPES[character]
    if character.isalnum() or not character.isascii():
        raise _refusal(pattern, f"\\{character}")
    return _characters(character)


def _characters(text: str) -> Ranges:
    return [(ord(character), ord(character)) for character in text]


def _without(ranges: Ranges, others: Iterable[tuple[int, int]]) -> Ranges:
    for low, high in others:
        parts = ((first, min(last, low - 1)) for first, last in ranges)
        ranges = [*parts, *((max(first, high + 1), last) for first, last in ranges)]
        ranges = sorted((first, last) for first, last in ranges if first <= last)
    return ranges


def _class(ranges: Ranges, in_json: bool, pattern: str = "") -> str:
    ranges = _without(ranges, [SURROGATES, *(NOT_IN_JSON if in_json else ())])
    if not ranges:
        raise _refusal(pattern, "a character that JSON escapes")
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    return "[" + "".join(f"{_code(first)}-{_code(last)}" for first, last in ranges) + "]"


def _code(code: int) -> str:
    character = chr(code)
    return (
        character if character.isascii() and character.isalnum() else f"\\u{code:04x}" if code <= 0xFFFF else character
    )


def _refusal(pattern: str, what: str) -> InvalidParameter:
    return InvalidParameter(
        f"structured: xgrammar does not respect {what!r:.60} in the expression {pattern!r:.200}: write it in another "
        "way, or start with grammar_backend llguidance"
    )
