"""Mistral: [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], and since 2025 [TOOL_CALLS]f[ARGS]{...} for each.

Some have an id as well: [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{...}
"""

import json
import re
import secrets
import string

from kvern.tools.buffered import BLANKS
from kvern.tools.json_call import JsonArguments
from kvern.tools.json_calls import NAMED, JsonCalls, JsonCallsParser
from kvern.tools.tool_format import IDENTITY, NAME, GrammarPieces, ToolFormat, ToolParser, ToolSchemas, literal

BEGIN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
HEAD = re.compile(rf"({NAME.pattern})(?:\[CALL_ID\](\w{{1,64}}))?(?:\[ARGS\])?\s*(?=\{{)")
LONGEST_HEAD = 256
LIST = JsonCalls("mistral", f"{BEGIN}[", *NAMED, ", ", "]")


def new_id() -> str:
    """An id of nine letters and digits, the form that Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Mistral(ToolFormat):
    """The format in one of its forms, which the template decides; see ToolFormat."""

    name = "mistral"
    markers = (BEGIN, ARGUMENTS, CALL_ID)
    trigger = BEGIN

    def __init__(self, named: bool = False, with_ids: bool = False) -> None:
        """`named`: calls begin with their name instead of being a list; `with_ids`: an id follows the name."""
        self._named, self._with_ids = named, with_ids

    def matches(self, template: str) -> bool:
        """True if the template has the form of this instance: lists, names first, or ids."""
        forms = (ARGUMENTS in template, CALL_ID in template)
        return BEGIN in template and forms == (self._named, self._with_ids)

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """All forms are understood; the marker leaves no doubt, so that calls of unknown tools are calls, too."""
        return MistralParser()

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls in the template's form."""
        if self._named:
            behind = (f"{CALL_ID}{IDENTITY}" if self._with_ids else "") + ARGUMENTS
            one = write.call(tools, lambda name: literal(name + behind, write))
            return f"{one} ({write.literal(BEGIN)} {one})*" if several else one
        one = write.call(tools, lambda name: write.literal(f'{{"name": {json.dumps(name)}, "arguments": '))
        call = f'{one} "}}"'
        more = f'(", " {call})*' if several else ""
        return f'" "? "[" {call} {more} "]"'


class MistralParser(JsonCallsParser):
    """A parser of content, calls in either form, and content."""

    new_id = staticmethod(new_id)

    def __init__(self) -> None:
        super().__init__(LIST, None)

    def open_state(self) -> bool:
        """Reads the text after the marker: a list, or the name of a call."""
        text = self.buffer.lstrip(BLANKS)
        if self._in_list or not text or text.startswith("["):
            return super().open_state()
        found = HEAD.match(text)
        if found is None or found.end() > LONGEST_HEAD:
            return (self.ended or "{" in text or len(text) > LONGEST_HEAD) and self.no_call()
        self.buffer = text[found.end() :]
        self.begin(found[1], found[2] or "")
        self.state = JsonArguments(self, self.close_call).state
        return True

    def close_call(self) -> None:
        """Content follows at once."""
        self.state = self.content_state
