"""Held-out questions for each task, and what counts as a right answer.

python -m training.exam     # writes src/kvern/bench/exam.jsonl, which `kvern bench accuracy` asks
"""

import json
from collections.abc import Iterator
from pathlib import Path

from training.draw import Draw, Example
from training.text import TASKS, stream
from training.tokenizer import render_calls

SEED = 20_000
EXAM = Path(__file__).parents[1] / "src/kvern/bench/exam.jsonl"
EACH = 16
"""Questions of each task in it."""


def questions(task: str, count: int, seed: int = SEED) -> list[Example]:
    """`count` distinct held-out examples of one task; the last message of each is the answer wanted.

    Facts and greetings are the same everywhere: held out there is the wording of a fact's question, and of greetings nothing.
    """
    draw = Draw(f"{seed}/{task}", held_out=True)
    distinct: dict[str, Example] = {}
    for _ in range(20 * count):
        example = TASKS[task](draw)
        distinct.setdefault(json.dumps([example.messages, example.tools]), example)
        if len(distinct) == count:
            break
    return list(distinct.values())


def conversations(count: int, seed: int = SEED) -> Iterator[Example]:
    """Held-out conversations of the training mix, for perplexity."""
    for _, example in zip(range(count), stream(Draw(f"{seed}/mix", held_out=True)), strict=False):
        yield example


def wanted(example: Example) -> str:
    """The text that the model must answer with, to the letter."""
    answer = example.messages[-1]
    return str(answer["content"]) + render_calls(answer)


def is_right(example: Example, text: str) -> bool:
    """Exact match; a story, which is free, must be of more than five sentences and hold every name that was asked for."""
    if example.task != "story" or len(example.messages) > 2:
        return text == wanted(example)
    asked, told = example.messages[0]["content"], wanted(example)
    names = {word.strip(",.?") for word in asked.split()[1:] if word[0].isupper() and word.strip(",.?") in told}
    return text.count(".") > 5 and all(name in text for name in names) and text[-1] in '."!'


def _row(example: Example) -> dict[str, object]:
    asked = {"messages": example.messages[:-1], "tools": example.tools}
    return {"task": example.task, **asked, "answer": wanted(example)}


def exam() -> str:
    """The exam as lines of JSON: all tasks but stories, which are free."""
    lines = [
        json.dumps(
            {
                "task": example.task,
                "messages": example.messages[:-1],
                "tools": example.tools,
                "answer": wanted(example),
            },
            ensure_ascii=False,
        )
        for task in TASKS
        if task != "story"
        for example in questions(task, EACH)
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    EXAM.write_text(exam(), encoding="utf-8")
