"""Grammars for llguidance, made of what a request asks and tried on a sample answer.

What llguidance cannot follow is refused. Nothing here is imported before the first form is compiled.

Grammars may be in GBNF, the notation of llama.cpp (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md).
For llguidance's converter escapes become characters, names of rules become short ones, `.` becomes a class of all
characters, and comments are left out.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvern.errors import InvalidParameter, shown
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.assertions import pointed_at
from kvern.structured.far_numbers import Unsaid, rules_of
from kvern.structured.llguidance_schema import held
from kvern.structured.matchers import GrammarLibrary, some_token
from kvern.structured.schema import rewrite

SAME_VALUE = ("allOf", "anyOf", "oneOf")
"""Keywords whose subschemas describe the value itself, not a part of it."""


def check_references(schema: Any) -> None:
    """Raises InvalidParameter if a reference leads to itself without describing a part of the value in between."""
    ended: set[int] = set()
    for start in _objects(schema):
        if id(start) in ended:
            continue
        path, places = [(start, _same_value(start, schema))], {id(start): 0}
        while path:
            place, following = path[-1]
            name, target = next(following, ("", {}))
            if not name:
                path.pop()
                del places[id(place)]
                ended.add(id(place))
            elif id(target) in places:
                raise InvalidParameter(
                    f"structured: the schema's {name} leads back to itself and describes no value: let it refer to a "
                    "schema with a type"
                )
            elif id(target) not in ended:
                places[id(target)] = len(path)
                path.append((target, _same_value(target, schema)))


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema's objects at any depth."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _same_value(schema: dict[str, Any], root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that a value of this one must or may follow, and how they are named."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = pointed_at(reference, root)
        if isinstance(target, dict):
            yield f"$ref {reference[:200]!r}", target
    for name in SAME_VALUE:
        several = schema.get(name)
        for target in several if isinstance(several, list) else ():
            if isinstance(target, dict):
                yield name, target


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


def plain_gbnf(grammar: str) -> str:
    """The grammar in the notation of llguidance's converter.

    Raises InvalidParameter for invalid escapes and for missing rules.
    """
    names = {"root": "root"}
    for name in RULE.findall(grammar):
        names.setdefault(name, f"r{len(names)}")
    return "".join(_written(found, names) for found in TOKENS.finditer(grammar))


def _written(found: re.Match[str], names: dict[str, str]) -> str:
    kind, held = found.lastgroup, found[0]
    if kind == "comment":
        return ""
    if kind == "any":
        return rf"[\x00-{chr(LAST)}]"
    if kind == "name":
        if held not in names:
            raise InvalidParameter(f"structured: the grammar has no rule {shown(held)}: define it with ::=")
        return names[held]
    if kind == "text":
        return _text(list(_codes(found["text"])))
    if kind == "members":
        codes = list(_codes(found["members"]))
        return f"[{found['negated']}{''.join(_member(code) for code in codes)}]"
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


def _text(codes: list[int | str]) -> str:
    """A literal; characters that a literal cannot contain become classes between literals."""
    parts = [""]
    for code in codes:
        character = chr(code) if isinstance(code, int) else code
        if character in '"\\':
            parts[-1] += f"\\{character}"
        elif character.isprintable() or ord(character) >= 0xA0:
            parts[-1] += character
        else:
            parts += [f"[{_member(ord(character))}]", ""]
    literals = [part if number % 2 else f'"{part}"' for number, part in enumerate(parts) if part or len(parts) == 1]
    return literals[0] if len(literals) == 1 else f"({' '.join(literals)})"


def _member(code: int | str) -> str:
    """A member of a class, or a dash between two of them."""
    if isinstance(code, str):
        return code
    character = chr(code)
    if code >= 0xA0 or (character.isascii() and character.isalnum()):
        return character
    return f"\\x{code:02x}"


LONGEST_MAKING_SECONDS = 0.25
"""Limit of the computing time for a new matcher."""
FIRST_STEPS = 32
"""The number of tokens of a sample answer that are followed when a grammar is compiled."""
LONGEST_STEPS_SECONDS = 0.2
"""Limit of the computing time for these tokens; less than `kvern.structured.masks` allows an answer."""
REMEDY = "use fewer properties, patterns, alternatives or repetitions"
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
"""Whitespace between the tokens of JSON; bounded, so that a model cannot write blanks forever."""


def compile_grammar(structured: StructuredOutput, library: GrammarLibrary) -> str:
    """A grammar for `library.matcher`. Raises InvalidParameter for unsupported or too expensive parts."""
    try:
        return _tried(GrammarText(library).of(structured), library)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(f"structured: {' '.join(str(error).split())[:500]}") from error


def _tried(grammar: str, library: GrammarLibrary) -> str:
    """The grammar, if its matcher can be made and follow a sample answer within limits of computing time."""
    start = time.thread_time()
    matcher = library.matcher(grammar)
    _check_time("to begin the answer", time.thread_time() - start, LONGEST_MAKING_SECONDS)
    problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
    if problem:
        raise ValueError(problem)
    _follow_first(matcher, library.ending)
    return grammar


class GrammarText:
    """Writes grammars in Lark's notation or in JSON, for the tokenizer of a library."""

    def __init__(self, library: GrammarLibrary) -> None:
        self._library = library

    def of(self, structured: StructuredOutput) -> str:
        """The grammar of what is asked. Raises InvalidParameter, ValueError or RecursionError."""
        if not structured.parts:
            return self._lone(structured)
        grammars = [{"lark_grammar": structured.grammar}]
        for name, part in structured.parts.items():
            written = self._lone(part)
            is_json = written.startswith("{")
            grammar = msgspec.json.decode(written)["grammars"][0] if is_json else {"lark_grammar": written}
            grammars.append({**grammar, "name": name})
        return msgspec.json.encode({"grammars": grammars}).decode()

    def _lone(self, structured: StructuredOutput) -> str:
        if structured.json is not None:
            schema: Mapping[str, Any] = {"type": "object"} if isinstance(structured.json, bool) else structured.json
            check_references(schema)
            rewritten = rewrite(schema)
            for exact in (True, False):
                with suppress(Unsaid):
                    return rules_of(rewritten, self._part, exact)
            return _schema_grammar(held(rewritten, self._has_text))
        if structured.regex is not None:
            return LLMatcher.grammar_from_regex(structured.regex)
        if structured.choice is not None:
            texts = " | ".join(msgspec.json.encode(text).decode() for text in structured.choice)
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
        assert structured.grammar is not None
        try:
            grammar = structured.grammar
            return LLMatcher.grammar_from_lark(gbnf_to_lark(plain_gbnf(grammar)) if is_gbnf(grammar) else grammar)
        except InvalidParameter:
            raise
        except RecursionError as error:
            raise InvalidParameter("structured: grammar is nested too deeply: name its parts in rules") from error
        except Exception as error:  # what the converter of GBNF raises for unknown rules
            raise ValueError(f"grammar: {error}") from error

    def _part(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """A part of a schema in the library's words; None if it allows no value."""
        made = held(schema, self._has_text)
        problem = LLMatcher.validate_grammar(_schema_grammar(made), self._library.tokenizer)
        return None if "nsatisfiable" in problem else {**made, "x-guidance": JSON_OPTIONS}

    def _has_text(self, schema: dict[str, Any]) -> bool:
        """True if a schema of strings allows at least one."""
        return not LLMatcher.validate_grammar(_schema_grammar(schema), self._library.tokenizer)


def _follow_first(matcher: LLMatcher, ending: int) -> None:
    """Follows the first tokens of a sample answer; `ending` has the bits of the tokens that end it.

    Raises InvalidParameter or ValueError if there is no answer, or if it takes too long.
    """
    start = time.thread_time()
    for place in range(FIRST_STEPS):
        mask = matcher.compute_bitmask()
        _check_time(f"to follow {place + 1} tokens", time.thread_time() - start, LONGEST_STEPS_SECONDS)
        problem = matcher.get_error()
        if problem.startswith("NoExtensionBias") and not place:
            raise ValueError("no text has this form: its rules exclude each other or lead nowhere")
        if problem:
            raise ValueError(f"after {place} tokens the form cannot be followed ({problem:.200}): {REMEDY}")
        if matcher.is_stopped():
            return
        matcher.consume_token(some_token(mask, ending, place))


def _check_time(what: str, seconds: float, most: float) -> None:
    if seconds > most:
        raise InvalidParameter(
            f"structured: it takes {seconds:.2f} s {what}, and all that run would wait: at most {most} s: {REMEDY}"
        )


def _schema_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
