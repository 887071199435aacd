"""GBNF, the notation of llama.cpp's grammars, in the part of it that the libraries read alike.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md describes it. Escapes become characters, names of
rules become short ones, `.` becomes a class of all characters, and comments are left out.
"""

import re
from collections.abc import Iterator

from kvern.errors import InvalidParameter, shown

RULE = re.compile(r"^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=", re.MULTILINE)
LARK = re.compile(r"^\s*(%llguidance\b|start\s*(\.\d+)?\s*:(?!:=))", re.MULTILINE)
TOKENS = re.compile(
    r'(?P<comment>#[^\r\n]*)|"(?P<text>(?:[^"\\]|\\.)*)"|\[(?P<negated>\^?)(?P<members>(?:[^\]\\]|\\.)*)\]'
    r"|(?P<count>\{[^}]*\})|(?P<name>[A-Za-z0-9_-]+)|(?P<any>\.)|(?P<other>.)",
    re.DOTALL,
)
CHARACTER = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\"\\\[\]nrt]))|([^\\])", re.DOTALL
)
NAMED = {"n": "\n", "r": "\r", "t": "\t"}
LAST = 0x10FFFF


def is_gbnf(grammar: str) -> bool:
    """True if a grammar is in GBNF, not in Lark's notation."""
    return RULE.search(grammar) is not None and LARK.search(grammar) is None


def plain_gbnf(grammar: str, escape: str) -> str:
    """The grammar in a form that all libraries read alike. `escape`: the notation of an ASCII code point in a class.

    Raises InvalidParameter for invalid escapes and for missing rules.
    """
    names = {"root": "root"}
    for name in RULE.findall(grammar):
        names.setdefault(name, f"r{len(names)}")
    return "".join(_written(found, names, escape) for found in TOKENS.finditer(grammar))


def _written(found: re.Match[str], names: dict[str, str], escape: str) -> str:
    kind, held = found.lastgroup, found[0]
    if kind == "comment":
        return ""
    if kind == "any":
        return f"[{escape.format(0)}-{chr(LAST)}]"
    if kind == "name":
        if held not in names:
            raise InvalidParameter(f"structured: the grammar has no rule {shown(held)}: define it with ::=")
        return names[held]
    if kind == "text":
        return _text(list(_codes(found["text"])), escape)
    if kind == "members":
        codes = list(_codes(found["members"]))
        return f"[{found['negated']}{''.join(_member(code, escape) for code in codes)}]"
    return held


def _codes(text: str) -> Iterator[int | str]:
    """Its characters as code points; a dash that is not escaped stays a text."""
    place = 0
    while place < len(text):
        found = CHARACTER.match(text, place)
        if found is None:
            raise InvalidParameter(
                f"structured: the grammar's escape {shown(text[place : place + 10])} is not known: use \\xHH, \\uHHHH, "
                '\\UHHHHHHHH, or one of \\n \\r \\t \\\\ \\" \\[ \\]'
            )
        place = found.end()
        digits = found[1] or found[2] or found[3]
        code = int(digits, 16) if digits else ord(NAMED.get(found[4], found[4]) if found[4] else found[5])
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise InvalidParameter(f"structured: the grammar's escape {shown(found[0])} names no character")
        yield "-" if found[5] == "-" else code


def _text(codes: list[int | str], escape: str) -> str:
    """A literal; characters that a literal cannot contain become classes between literals."""
    parts = [""]
    for code in codes:
        character = chr(code) if isinstance(code, int) else code
        if character in '"\\':
            parts[-1] += f"\\{character}"
        elif character.isprintable() or ord(character) >= 0xA0:
            parts[-1] += character
        else:
            parts += [f"[{_member(ord(character), escape)}]", ""]
    literals = [part if number % 2 else f'"{part}"' for number, part in enumerate(parts) if part or len(parts) == 1]
    return literals[0] if len(literals) == 1 else f"({' '.join(literals)})"


def _member(code: int | str, escape: str) -> str:
    """A member of a class, or a dash between two of them."""
    if isinstance(code, str):
        return code
    character = chr(code)
    if code >= 0xA0 or (character.isascii() and character.isalnum()):
        return character
    return escape.format(code)
