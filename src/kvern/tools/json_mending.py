"""Repair of almost-JSON from models: syntax of Python and JavaScript is converted to JSON.

That is: line breaks and other control characters in strings, strings in single quotes, unknown escapes, `True`,
`False`, `None` and similar, and commas before a closing bracket. Valid JSON is not changed.
"""

import json
import re

WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null", "NaN": "null"}
WORD = re.compile(r"[A-Za-z]+")
BLANK = re.compile(r"\s*")
PLAIN = {quote: re.compile(rf"[^\\{quote}\"\x00-\x1f]+") for quote in "'\""}
OUTSIDE = re.compile(r"[^A-Za-z'\",]+")
ESCAPES = '"\\/bfnrtu'


class JsonMender:
    """Repairs a growing text. The joined results of `feed` and `end` do not depend on how the text is cut."""

    def __init__(self) -> None:
        self._held = ""
        self._quote = ""

    def feed(self, text: str, ended: bool = False) -> str:
        """The next characters, mended; with `ended` the last ones."""
        text, mended = self._held + text, []
        place = 0
        while place < len(text):
            taken, written = (self._inside if self._quote else self._outside)(text, place, ended)
            if not taken:
                break
            place += taken
            mended.append(written)
        self._held = text[place:]
        return "".join(mended)

    def _outside(self, text: str, place: int, ended: bool) -> tuple[int, str]:
        """The number of characters that are complete, and their replacement."""
        sign = text[place]
        if sign in "'\"":
            self._quote = sign
            return 1, '"'
        if sign == ",":
            behind = BLANK.match(text, place + 1)
            assert behind is not None
            if behind.end() == len(text) and not ended:
                return 0, ""
            blanks = behind[0] if text[behind.end() : behind.end() + 1] in ("}", "]") else "," + behind[0]
            return behind.end() - place, blanks
        if word := WORD.match(text, place):
            if word.end() == len(text) and not ended:
                return 0, ""
            return len(word[0]), WORDS.get(word[0], word[0])
        found = OUTSIDE.match(text, place)
        assert found is not None
        return len(found[0]), found[0]

    def _inside(self, text: str, place: int, ended: bool) -> tuple[int, str]:
        sign = text[place]
        if sign == self._quote:
            self._quote = ""
            return 1, '"'
        if sign == "\\":
            following = text[place + 1 : place + 2]
            if not following:
                return (1, sign) if ended else (0, "")
            if following == "'":
                return 2, "'"
            return (2, sign + following) if following in ESCAPES else (1, "\\\\")
        if sign < " " or sign == '"':
            return 1, json.dumps(sign)[1:-1]
        found = PLAIN[self._quote].match(text, place)
        assert found is not None
        return len(found[0]), found[0]
