"""A conversation in a terminal: text broken between words, dim figures, and a line while one waits."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

FENCE = "```"
ERASE = "\r\x1b[K"
TICK_SECONDS = 1.0


class Wrapped:
    """Text that comes in pieces, with line breaks between words where a line of the terminal is full.

    A word, with the blank before it, is written when it has ended. Lines of code between two FENCEs stay as they are.
    """

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self._word = ""
        self._line = ""
        self._column = 0
        self._is_code = False

    def __call__(self, text: str) -> None:
        width = shutil.get_terminal_size().columns
        self._write("".join(self._placed(character, width) for character in text))

    def _placed(self, character: str, width: int) -> str:
        """Returns what can be written now that a character follows: nothing within a word."""
        from prompt_toolkit.utils import get_cwidth

        cells = get_cwidth(character)
        if character not in " \n" and cells < 2 and len(self._word) < width:  # wide characters are words of their own
            self._word += character
            return ""
        word, self._word = self._word, " " if character == " " else ""
        self._line += word
        begun = word
        if word.startswith(" ") and self._column + get_cwidth(word) > width and not self._is_code:
            word = word[1:]
            begun, self._column = (f"\n{word}", 0) if word else ("", self._column)
        self._column += get_cwidth(word)
        if character == "\n":
            self._is_code ^= self._line.lstrip().startswith(FENCE)
            self._line, self._column = "", 0
        elif character != " ":
            self._line += character
            self._column += cells
        if self._column > width:  # the terminal breaks what is longer
            self._column = (self._column - 1) % width + 1
        return begun if character == " " else begun + character


def dim(text: str) -> str:
    """Returns a text in a weaker colour, if stdout is a terminal with colours, and NO_COLOR does not forbid them."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


class Waiting(logging.Handler):
    """A line on stderr, with the seconds, while something is waited for; none if stderr is no terminal.

    What is logged meanwhile stands above it.
    """

    def __init__(self, text: str, after: float = 0.0) -> None:
        """`after`: the seconds until the line is shown."""
        super().__init__(logging.WARNING)
        self._text = text
        self._shows = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._after = after
        self._begun = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="waiting", daemon=True)

    def show(self, text: str) -> None:
        """Replaces the line's text, and counts its seconds anew."""
        self._text, self._begun = text, time.monotonic()
        if self._shows:
            self._draw()

    def __enter__(self) -> Self:
        if self._shows:
            logging.getLogger().addHandler(self)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._shows:
            self._thread.join()
            logging.getLogger().removeHandler(self)
            sys.stderr.write(ERASE)
            sys.stderr.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self._draw(f"{self.format(record)}\n")

    def _tick(self) -> None:
        self._ended.wait(self._after)
        while not self._ended.is_set():
            self._draw()
            self._ended.wait(TICK_SECONDS)

    def _draw(self, above: str = "") -> None:
        seconds = int(time.monotonic() - self._begun)
        line = (f"{seconds} s: " if seconds else "") + self._text
        sys.stderr.write(f"{ERASE}{above}{line[: shutil.get_terminal_size().columns - 1]}")  # in one piece
        sys.stderr.flush()
