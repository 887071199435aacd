"""The marks of thinking that a chat template writes around what an assistant's message has thought.

A conversation is rendered whose last message has a thought:

    ...<|open|>think<|sep|>THOUGHT<|close|>think<|sep|><|open|>response<|sep|>SAID<|close|>response<|sep|>...
       begin                      end                  opens an answer            closes it

An end mark is known as the partner of its begin mark, as `</a>` is that of `<a>`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvern.errors import InvalidRequest
from kvern.text.chat_template import ChatTemplate

ASKED, THOUGHT, SAID = "kvern-asked", "kvern-thought", "kvern-said"
SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
PARTNERS = (("START", "END"), ("start", "end"), ("BEGIN", "END"), ("begin", "end"), ("open", "close"), ("pre", "suf"))
OPENED = re.compile(r"<(?!\|)[^<>/]*(?:think|reason|thought)[^<>/]*>\Z", re.IGNORECASE)
"""What a prompt ends with that opens the thinking."""


class Marks(NamedTuple):
    """`answer` opens the answer behind the thinking; `wraps` stand around it."""

    begin: str
    end: str
    answer: str = ""
    wraps: tuple[str, ...] = ()


def written_marks(template: str, names: Sequence[str]) -> Marks | None:
    """Those around a thought; `names` are what messages may call it. None: the template writes it without, or not."""
    said = {"role": "assistant", "content": SAID, **dict.fromkeys(names, THOUGHT)}
    before, thought, rest = _behind_question(template, [said], False).partition(THOUGHT)
    middle, answered, after = rest.partition(SAID)
    if not thought or not answered:
        return None
    before, middle, after = before.rstrip(), middle.strip(), after.strip()
    for start in reversed([match.start() for match in MARK.finditer(before)]):
        begin = before[start:]
        for end in _partners(begin):
            if middle.startswith(end):
                answer = middle[len(end) :].strip()
                closes = [closed for closed in _partners(answer) if after.startswith(closed)]
                return Marks(begin, end, answer, (answer, *closes)) if answer else Marks(begin, end)
    return None


def opened_marks(template: str) -> Marks | None:
    """That with which prompts end, if it opens thinking by its name, and its partner."""
    opened = OPENED.search(_behind_question(template, [], True).rstrip())
    return None if opened is None else next((Marks(opened[0], end) for end in _partners(opened[0])), None)


def _partners(mark: str) -> list[str]:
    """What may close what a mark opens."""
    closed = [f"{mark[:place]}/{mark[place:]}" for place in (1, 2) if mark[:1] in ("<", "[")]
    return closed + [mark.replace(one, other) for one, other in PARTNERS if one in mark]


def _behind_question(template: str, answers: Sequence[Mapping[str, Any]], prompt: bool) -> str:
    """What is rendered behind a user's message; empty if the template refuses."""
    try:
        asked = {"role": "user", "content": ASKED}
        text = ChatTemplate({"default": template}).render([asked, *answers], None, prompt, SPECIAL_TOKENS)
    except InvalidRequest:
        return ""
    return text.rpartition(ASKED)[2]
