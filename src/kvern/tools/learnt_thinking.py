"""The marks around thinking, learnt from a chat template's rendering of an assistant's message.

The last message of the rendered conversation contains thinking:

    ...<|open|>think<|sep|>THOUGHT<|close|>think<|sep|><|open|>response<|sep|>SAID<|close|>response<|sep|>...
       begin                      end                  opens an answer            closes it

An end mark is recognized as the partner of its begin mark, as `</a>` is that of `<a>`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvern.errors import InvalidRequest
from kvern.text.chat_template import ChatTemplate

ASKED = "kvern-asked"
THOUGHT = "kvern-thought"
SAID = "kvern-said"
SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
PARTNERS = (("START", "END"), ("start", "end"), ("BEGIN", "END"), ("begin", "end"), ("open", "close"), ("pre", "suf"))
OPENED = re.compile(r"<(?!\|)[^<>/]*(?:think|reason|thought)[^<>/]*>\Z", re.IGNORECASE)
"""A mark at the end of a prompt that opens the thinking."""


class Marks(NamedTuple):
    """The marks around thinking; `answer` opens the answer after it, and `wraps` surround the answer."""

    begin: str
    end: str
    answer: str = ""
    wraps: tuple[str, ...] = ()


def written_marks(template: str, names: Sequence[str]) -> Marks | None:
    """The marks around thinking; `names` are the fields of a message for it. None: the template renders no thinking."""
    said = {"role": "assistant", "content": SAID, **dict.fromkeys(names, THOUGHT)}
    before, thought, rest = _behind_question(template, [said], False).partition(THOUGHT)
    middle, answered, after = rest.partition(SAID)
    if not thought or not answered:
        return None
    before = before.rstrip()
    middle = middle.strip()
    after = after.strip()
    for start in reversed([match.start() for match in MARK.finditer(before)]):
        begin = before[start:]
        for end in _partners(begin):
            if middle.startswith(end):
                answer = middle[len(end) :].strip()
                closes = [closed for closed in _partners(answer) if after.startswith(closed)]
                return Marks(begin, end, answer, (answer, *closes)) if answer else Marks(begin, end)
    return None


def opened_marks(template: str) -> Marks | None:
    """The mark at the end of prompts, if its name says that it opens thinking, and its partner."""
    opened = OPENED.search(_behind_question(template, [], True).rstrip())
    return None if opened is None else next((Marks(opened[0], end) for end in _partners(opened[0])), None)


def _partners(mark: str) -> list[str]:
    """The possible partners of a mark."""
    closed = [f"{mark[:place]}/{mark[place:]}" for place in (1, 2) if mark[:1] in ("<", "[")]
    return closed + [mark.replace(one, other) for one, other in PARTNERS if one in mark]


def _behind_question(template: str, answers: Sequence[Mapping[str, Any]], prompt: bool) -> str:
    """The text after a user's message; empty if the template refuses."""
    try:
        asked = {"role": "user", "content": ASKED}
        text = ChatTemplate({"default": template}).render([asked, *answers], None, prompt, SPECIAL_TOKENS)
    except InvalidRequest:
        return ""
    return text.rpartition(ASKED)[2]
